// The options that several subcommands share, and what they select.
#pragma once
#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/rows.h"
#include "harness/device.h"
#include "harness/problem.h"
#include "harness/registry.h"

namespace flash::cli {

// An option whose value is a number and nothing else: '' and '5x' are refused.
CLI::Option* add_number(CLI::App& command, const std::string& name, std::optional<int>& value, const std::string& help);
CLI::Option* add_number(CLI::App& command, const std::string& name, std::optional<double>& value,
                        const std::string& help);

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
  std::string from;
  bool tensor_scales = false, no_rotation = false;

  void add_shape_to(CLI::App& command);  // --batch --heads --kv-heads --seq --seq-k --head-dim
  void add_rest_to(CLI::App& command);   // --dtype --causal --deterministic --scale --dropout --seed, and e4m3's own

  bool has_shape() const { return batch || heads || kv_heads || seq || seq_k || head_dim; }
  bool quantises() const { return !from.empty() || tensor_scales || no_rotation; }
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
