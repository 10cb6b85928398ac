// The options that several subcommands share, and what they select.
#pragma once
#include <CLI/CLI.hpp>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "cli/rows.h"
#include "harness/device.h"
#include "harness/problem.h"
#include "harness/registry.h"

namespace flash::cli {

// What a number may be, both ends included; NaN is never within bounds.
template <class T>
struct Bounds {
  T least, most;
};

// An option whose value is a number and nothing else: '' and '5x' are refused, and so is what is out of bounds, if
// there are any.
template <class T>
CLI::Option* add_number(CLI::App& command, const std::string& name, std::optional<T>& value, const std::string& help,
                        std::optional<Bounds<std::type_identity_t<T>>> bounds = {});

// Of --sample.
constexpr Bounds<int> kSamples = {1, std::numeric_limits<int>::max()};

// --seed: any 64-bit number.
void add_seed(CLI::App& command, uint64_t& seed, const std::string& help);

// An option that names a file or a folder: '' is refused, so that an empty variable of a script is not taken for an
// option that was left out.
CLI::Option* add_path(CLI::App& command, const std::string& name, std::string& path, const std::string& help,
                      const std::string& kind = "file");

// --device: which one, as asked for.
enum class DeviceChoice { automatic, gpu, cpu };

struct DeviceOption {
  DeviceChoice choice = DeviceChoice::automatic;
  void add_to(CLI::App& command);
};

// A device and where that decision came from.
struct ChosenDevice {
  Device* device = nullptr;
  std::string sentence;  // "GPU: NVIDIA H200" or "CPU executor: there is no NVIDIA GPU here"
};

// The GPU if one is usable, else the CPU executor; throws Error for --device gpu without one.
ChosenDevice choose_device(DeviceChoice choice);

struct FormatOption {
  Format format = Format::table;
  void add_to(CLI::App& command);
};

// The options that describe a problem; those not given stay empty.
struct ProblemOptions {
  std::optional<int> batch, heads, kv_heads, seq, seq_k, head_dim;
  std::optional<std::string> dtype;
  std::optional<double> scale, dropout;
  uint64_t seed = 0;
  bool causal = false;
  bool deterministic = false;
  std::optional<DType> from;
  bool tensor_scales = false, no_rotation = false;

  void add_shape_to(CLI::App& command);  // --batch --heads --kv-heads --seq --seq-k --head-dim
  void add_rest_to(CLI::App& command);   // --dtype --causal --deterministic --scale --dropout --seed, and e4m3's own

  bool has_shape() const { return batch || heads || kv_heads || seq || seq_k || head_dim; }
  bool quantises() const { return from || tensor_scales || no_rotation; }
  // `start` with what was given in place of its own; validated. Options of e4m3 alone make it the dtype.
  Problem apply(Problem start) const;
};

// The steps as named on the command line, by prefixes of their ids.
struct StepOption {
  std::vector<std::string> prefixes;
  void add_to(CLI::App& command);
};

// --pass: forward, backward or both.
struct PassOption {
  std::string name = "both";
  void add_to(CLI::App& command);
  std::vector<Pass> passes() const;
};

// Progress on stderr, overwritten in place; nothing when stderr is no terminal.
class Progress {
 public:
  Progress();
  ~Progress();
  void show(const std::string& text);

 private:
  bool terminal_;
  size_t shown_ = 0;
};

std::string name_of(Pass pass);

}  // namespace flash::cli
