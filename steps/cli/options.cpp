#include "cli/options.h"

#include <unistd.h>

#include <charconv>
#include <iostream>
#include <limits>
#include <map>
#include <sstream>
#include <type_traits>

#include "harness/error.h"

namespace flash::cli {
namespace {

const std::map<std::string, DeviceChoice> kDevices = {
    {"auto", DeviceChoice::automatic}, {"gpu", DeviceChoice::gpu}, {"cpu", DeviceChoice::cpu}};
const std::map<std::string, Format> kFormats = {{"table", Format::table}, {"csv", Format::csv}, {"json", Format::json}};
const std::map<std::string, DType> kQuantised = {{"bf16", DType::bf16}, {"fp32", DType::fp32}};

// An option whose words stand for values: anything else is refused with the list of them.
template <class Value, class T>
void add_choice(CLI::App& command, const std::string& name, Value& value, const std::map<std::string, T>& words,
                const std::string& help) {
  std::string list;
  for (const auto& [word, meaning] : words) list += (list.empty() ? "" : ", ") + word;
  command
      .add_option_function<std::string>(
          name,
          [&value, words, name, list](const std::string& word) {
            const auto it = words.find(word);
            if (it == words.end()) throw Error(name + ": there is no '" + word + "'; choose one of " + list);
            value = it->second;
          },
          help + " (" + list + ")")
      ->type_name("")
      ->expected(0, 1);  // without a value it is asked for '', and refuses that
}

// "number", or "whole number from -2147483648 to 2147483647".
template <class T>
std::string kind_of_number() {
  if constexpr (std::is_floating_point_v<T>) return "number that fp64 can hold";
  using Limits = std::numeric_limits<T>;
  return "whole number from " + std::to_string(Limits::min()) + " to " + std::to_string(Limits::max());
}

template <class T>
T number_in(const std::string& name, const std::string& text) {
  T number{};
  const bool plus = text.size() > 1 && text[0] == '+' && text[1] != '-';
  const auto [end, failed] = std::from_chars(text.data() + plus, text.data() + text.size(), number);
  if (failed == std::errc() && end == text.data() + text.size()) return number;
  throw Error(name + ": '" + text + "' is no " + kind_of_number<T>());
}

// "must be at least 1", "must be from 0 to 60".
template <class T>
std::string demand(const Bounds<T>& bounds) {
  std::ostringstream text;
  text << "must be ";
  if (bounds.most == std::numeric_limits<T>::max())
    text << "at least " << bounds.least;
  else
    text << "from " << bounds.least << " to " << bounds.most;
  return text.str();
}

}  // namespace

template <class T>
CLI::Option* add_number(CLI::App& command, const std::string& name, std::optional<T>& value, const std::string& help,
                        std::optional<Bounds<std::type_identity_t<T>>> bounds) {
  return command
      .add_option_function<std::string>(
          name,
          [&value, name, bounds](const std::string& text) {
            value = number_in<T>(name, text);
            if (bounds && !(*value >= bounds->least && *value <= bounds->most))
              throw Error(name + ": " + demand(*bounds) + ", not " + text);
          },
          help)
      ->type_name(std::is_floating_point_v<T> ? "FLOAT" : "INT");
}

template CLI::Option* add_number<int>(CLI::App&, const std::string&, std::optional<int>&, const std::string&,
                                      std::optional<Bounds<int>>);
template CLI::Option* add_number<double>(CLI::App&, const std::string&, std::optional<double>&, const std::string&,
                                         std::optional<Bounds<double>>);

void add_seed(CLI::App& command, uint64_t& seed, const std::string& help) {
  command
      .add_option_function<std::string>(
          "--seed", [&seed](const std::string& text) { seed = number_in<uint64_t>("--seed", text); }, help)
      ->type_name("UINT");
}

CLI::Option* add_path(CLI::App& command, const std::string& name, std::string& path, const std::string& help,
                      const std::string& kind) {
  return command
      .add_option_function<std::string>(
          name,
          [&path, name, kind](const std::string& given) {
            if (given.empty()) throw Error(name + ": give the name of a " + kind);
            path = given;
          },
          help)
      ->type_name(kind == "file" ? "FILE" : "DIR");
}

void DeviceOption::add_to(CLI::App& command) {
  add_choice(command, "--device", choice, kDevices, "Where to run; auto takes the GPU if one is usable");
}

ChosenDevice choose_device(DeviceChoice choice) {
  if (choice == DeviceChoice::cpu) return {&cpu_device(), cpu_device().name()};
  std::string why;
  if (Device* gpu = gpu_device(&why)) return {gpu, "GPU: " + gpu->name()};
  if (choice == DeviceChoice::gpu) throw Error("--device gpu: " + why + "; --device cpu runs the same kernels");
  return {&cpu_device(), cpu_device().name() + ", since " + why};
}

void FormatOption::add_to(CLI::App& command) { add_choice(command, "--format", format, kFormats, "How to print"); }

void ProblemOptions::add_shape_to(CLI::App& command) {
  add_number(command, "--batch", batch, "Batch size B");
  add_number(command, "--heads", heads, "Query heads");
  add_number(command, "--kv-heads", kv_heads, "Key/value heads, a divisor of --heads; default: the same");
  add_number(command, "--seq", seq, "Sequence length of the queries, Nq");
  add_number(command, "--seq-k", seq_k, "Sequence length of the keys, Nk; default: the same");
  add_number(command, "--head-dim", head_dim, "Head dimension D");
}

void ProblemOptions::add_rest_to(CLI::App& command) {
  command
      .add_option_function<std::string>(
          "--dtype", [this](const std::string& word) { dtype = name_of(dtype_named(word)); },
          "Precision of the tensors: fp64, fp32, fp16, bf16 or e4m3")
      ->expected(0, 1);
  add_choice(command, "--from", from, kQuantised, "e4m3: what it is quantised from; default bf16");
  command.add_flag("--tensor-scales", tensor_scales, "e4m3: one scale for all of Q, K, V instead of one for each tile");
  command.add_flag("--no-rotation", no_rotation, "e4m3: do not rotate the rows of Q and K");
  command.add_flag("--causal", causal, "Query i sees the keys j <= i + (Nk - Nq)");
  command.add_flag("--deterministic", deterministic, "Gradients have the same bits in every run");
  add_number(command, "--scale", scale, "Factor of the scores; default 1/sqrt(D)");
  add_number(command, "--dropout", dropout, "Probability that a weight is dropped, 0 <= p < 1");
  add_seed(command, seed, "Seed of random inputs and of the dropout mask");
}

Problem ProblemOptions::apply(Problem p) const {
  p.B = batch.value_or(p.B);
  p.Hq = heads.value_or(p.Hq);
  p.Hkv = kv_heads.value_or(heads ? *heads : p.Hkv);
  p.Nq = seq.value_or(p.Nq);
  p.Nk = seq_k.value_or(seq ? *seq : p.Nk);
  if (head_dim) {
    p.D = *head_dim;
    p.scale = p.D > 0 ? default_scale(p.D) : 0.0;
  }
  if (dtype) p.dtype = dtype_named(*dtype);
  p.scale = scale.value_or(p.scale);
  p.dropout = dropout.value_or(p.dropout);
  p.causal = p.causal || causal;
  p.deterministic = p.deterministic || deterministic;
  p.seed = seed;
  p.quantisation.from = from.value_or(p.quantisation.from);
  if (tensor_scales) p.quantisation.tile_scales = false;
  if (no_rotation) p.quantisation.rotation = false;
  if (!dtype && quantises()) p.dtype = DType::e4m3;
  validate(p);
  return p;
}

void StepOption::add_to(CLI::App& command) {
  command.add_option("STEP", prefixes, "Steps, by any prefix of their ids (05, 08/ping); default: all")->type_name("");
}

void PassOption::add_to(CLI::App& command) {
  command
      .add_option_function<std::string>(
          "--pass",
          [this](const std::string& word) {
            if (word != "forward" && word != "backward" && word != "both")
              throw Error("--pass: there is no '" + word + "'; choose one of forward, backward, both");
            name = word;
          },
          "forward, backward or both")
      ->expected(0, 1);
}

std::vector<Pass> PassOption::passes() const {
  if (name == "forward") return {Pass::forward};
  if (name == "backward") return {Pass::backward};
  return {Pass::forward, Pass::backward};
}

Progress::Progress() : terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { show(""); }

void Progress::show(const std::string& text) {
  if (!terminal_) return;
  std::string line = text;
  if (line.size() < shown_) line.append(shown_ - line.size(), ' ');
  std::cerr << '\r' << line << (text.empty() ? "\r" : "") << std::flush;
  shown_ = text.size();
}

std::string name_of(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

}  // namespace flash::cli
