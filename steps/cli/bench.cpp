// `flashsteps bench`: speed on the GPU, by the protocol of the FlashAttention-2 and -3 papers: 16,384 tokens in all,
// hidden size 2,048, single launches timed with events, medians.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <thread>

#include "cli/commands.h"
#include "cli/files.h"
#include "cli/options.h"
#include "cli/plot.h"
#include "cli/verify.h"
#include "harness/inputs.h"
#include "harness/interrupt.h"
#include "harness/rates.h"
#include "harness/runner.h"

namespace flash::cli {
namespace {

constexpr int kTokens = 16384, kHidden = 2048;
constexpr int kWarmUp = 3;             // launches
constexpr int kLaunches = 11;          // that are timed
constexpr double kIdle = 0.2;          // seconds
constexpr double kCacheBytes = 256e6;  // several times any GPU's L2: what the rotated inputs fill together

struct BenchOptions {
  StepOption steps;
  ProblemOptions problem;
  PassOption pass;
  FormatOption format;
  std::optional<double> idle;  // seconds
  std::optional<int> launches;
  std::string csv, plot;
};

double percentile(const std::vector<double>& sorted, double share) {
  return sorted[size_t(std::lround(share * double(sorted.size() - 1)))];
}

// Bytes that the pass must move at least: each input read once, each output written once.
double least_bytes(const Problem& p, Pass pass) {
  const double q = double(p.q_elements()) * double(bytes_of(p.dtype));
  const double o = double(p.q_elements()) * double(bytes_of(output_dtype(p)));
  const double kv = double(p.kv_elements()) * double(bytes_of(p.dtype));
  const double lse = double(p.query_rows()) * 4;
  return pass == Pass::forward ? q + o + 2 * kv + lse : 4 * q + 4 * kv + lse;
}

// The same for quantising Q, K and V.
double quantised_bytes(const Problem& p) {
  return double(p.q_elements() + 2 * p.kv_elements()) * double(bytes_of(input_dtype(p)) + bytes_of(p.dtype));
}

class Bench {
 public:
  explicit Bench(const BenchOptions& options) : options_(options), gpu_(gpu_or_refuse()), rates_(measure_rates(gpu_)) {}

  int run() {
    const bool table = options_.format.format == Format::table;
    if (table)
      std::cout << "GPU: " << gpu_.name() << ", measured: " << std::lround(rates_.fp32_flops / 1e11) / 10.0
                << " TFLOP/s fp32, " << std::lround(rates_.bf16_flops / 1e12) << " bf16 ("
                << std::lround(rates_.mma_sync_flops / 1e12) << " by mma.sync), "
                << std::lround(rates_.e4m3_flops / 1e12) << " e4m3, copy " << std::lround(rates_.hbm_bytes / 1e9)
                << " GB/s\n\n";
    std::string refusal;
    for (const RegisteredStep* step : select_steps(options_.steps.prefixes))
      for (Pass pass : options_.pass.passes()) {
        if (!step->has(pass)) continue;
        for (const Problem& p : problems_for(*step)) {
          const auto why = why_unsupported(*step, p, pass);
          if (!why && step->builds.count(Target::gpu))
            time(*step, pass, p);
          else if (refusal.empty())
            refusal = why ? *why : step->id + " has no code for the GPU in this build";
        }
      }
    progress_.show("");
    if (rows_.empty() && !notes_.empty()) refusal = notes_.front();
    if (rows_.empty()) throw Error(refusal.empty() ? "no step has the pass that was asked for" : refusal);
    print_rows(std::cout, options_.format.format, rows_);
    std::cout.flush();  // the table is there, whatever becomes of the files
    for (const std::string& note : notes_) std::cerr << note << "\n";
    write_outputs();
    return 0;
  }

 private:
  static Device& gpu_or_refuse() {
    std::string why;
    if (Device* gpu = gpu_device(&why)) return *gpu;
    throw Error("bench times kernels on a GPU, but " + why + "; check and tour run on the CPU, with --device cpu");
  }

  // The given shape; without one, the papers' lengths.
  std::vector<Problem> problems_for(const RegisteredStep& step) const {
    const Step& info = step.info();
    Problem start;
    start.dtype = info.dtypes.front();
    start.D = std::count(info.head_dims.begin(), info.head_dims.end(), 64) ? 64 : info.head_dims.front();
    start.D = options_.problem.head_dim.value_or(start.D);
    start.scale = start.D > 0 ? default_scale(start.D) : 0;
    std::vector<int> lengths = {512, 1024, 2048, 4096, 8192, 16384};
    if (options_.problem.seq) lengths = {*options_.problem.seq};
    std::vector<Problem> problems;
    for (int N : lengths) {
      start.Nq = start.Nk = N;
      start.B = std::max(1, kTokens / std::max(1, N));
      start.Hq = start.Hkv = std::max(1, kHidden / std::max(1, start.D));
      problems.push_back(options_.problem.apply(start));
    }
    return problems;
  }

  void time(const RegisteredStep& step, Pass pass, const Problem& p) {
    throw_if_interrupted();
    progress_.show(step.id + " " + name_of(pass) + ": " + describe(p));
    HostTensors tensors = inputs_for(p);
    if (pass == Pass::backward && !forward_of(step)) {  // any finite numbers do: speed does not depend on them
      tensors.O = tensors.dO;
      tensors.LSE.assign(p.query_rows(), std::log(std::max(1.0, double(p.Nk))));
    }
    // Small problems take turns with copies of themselves, so that no launch finds its inputs in the cache.
    const int copies = int(std::clamp(std::ceil(kCacheBytes / std::max(1.0, least_bytes(p, pass))), 1.0, 8.0));
    std::vector<std::unique_ptr<PreparedStep>> prepared;
    try {
      for (int i = 0; i < copies; i++)
        prepared.push_back(std::make_unique<PreparedStep>(gpu_, Target::gpu, step, pass, p, tensors));
    } catch (const Error& e) {
      if (prepared.empty()) {
        notes_.push_back(step.id + " " + name_of(pass) + ", " + describe(p) + ": left out: " + e.what());
        return;
      }
    }
    const auto one = [&](int i) -> const PreparedStep& { return *prepared[size_t(i) % prepared.size()]; };
    const auto launch_pass = [&](int i) { one(i).launch_pass(); };
    if (prepared.front()->quantises()) {
      // Quantising is timed apart: a model may have its tensors in e4m3 from the start, or make them where they arise.
      const std::vector<double> ms = times([&](int i) { one(i).launch_quantisation(); });
      for (int i = 0; i < int(prepared.size()); i++) one(i).launch_quantisation();
      add_row(step, "quantise", p, ms, quantised_bytes(p) / rates_.hbm_bytes, 0, one(0).scratch_bytes());
    }
    const std::vector<double> ms = times(launch_pass);
    prepared.front()->check_guards();
    // A GPU without the units for this type has no rate, and no bound.
    const double rate = matrix_rate(p.dtype),
                 least = std::max(flops(p, pass) / rate, least_bytes(p, pass) / rates_.hbm_bytes);
    add_row(step, name_of(pass), p, ms, rate > 0 ? least : 0, flops(p, pass), one(0).scratch_bytes());
  }

  // Of some launches after a rest, sorted.
  std::vector<double> times(const std::function<void(int)>& launch) {
    const auto interruptible = [&](int i) {
      throw_if_interrupted();
      launch(i);
    };
    gpu_.times_ms(kWarmUp, interruptible);
    std::this_thread::sleep_for(std::chrono::duration<double>(options_.idle.value_or(kIdle)));
    std::vector<double> ms = gpu_.times_ms(kWarmUp + options_.launches.value_or(kLaunches), interruptible);
    ms.erase(ms.begin(), ms.begin() + kWarmUp);
    std::sort(ms.begin(), ms.end());
    return ms;
  }

  // `least`: seconds that it must take; 0: not known.
  void add_row(const RegisteredStep& step, const std::string& what, const Problem& p, const std::vector<double>& ms,
               double least, double operations, size_t scratch_bytes) {
    const double median = percentile(ms, 0.5);
    rows_.push_back({{"step", step.id},
                     {"dtype", flash::name_of(p.dtype)},
                     {"head_dim", p.D},
                     {"causal", int(p.causal)},
                     {"seq", p.Nq},
                     {"batch", p.B},
                     {"heads", p.Hq},
                     {"pass", what},
                     {"ms", median},
                     {"ms_p10", percentile(ms, 0.1)},
                     {"ms_p90", percentile(ms, 0.9)},
                     {"tflops", operations > 0 ? Row(operations / median / 1e9) : Row(nullptr)},
                     {"bound_fraction", least > 0 ? Row(1e3 * least / median) : Row(nullptr)},
                     {"scratch_bytes", scratch_bytes}});
  }

  // Of the units that multiply this type, operations a second.
  double matrix_rate(DType type) const {
    if (type == DType::e4m3) return rates_.e4m3_flops;
    return bytes_of(type) == 2 ? rates_.bf16_flops : rates_.fp32_flops;
  }

  // The last problem's inputs are kept: the next one mostly has as many numbers, if in another shape.
  const HostTensors& inputs_for(const Problem& p) {
    const std::string key = std::to_string(p.q_elements()) + " " + std::to_string(p.kv_elements()) + " " +
                            flash::name_of(input_dtype(p)) + " " + std::to_string(p.seed);
    if (inputs_key_ != key) {
      inputs_ = {};
      require_host_memory("timing " + describe(p), (2.0 * double(p.q_elements()) + 2.0 * double(p.kv_elements())) * 8);
      inputs_ = random_tensors(p, p.seed);
    }
    inputs_key_ = key;
    return inputs_;
  }

  void write_outputs() const {
    std::vector<OutputFile> files;
    if (!options_.csv.empty()) {
      std::ostringstream csv;
      print_rows(csv, Format::csv, rows_);
      files.push_back({options_.csv, csv.str()});
    }
    if (!options_.plot.empty()) {
      files.push_back({options_.plot, line_plot_svg(plot_title(), "sequence length", "TFLOP/s", plot_lines())});
    }
    if (!files.empty()) write_files(files);
  }

  // The GPU, and what all rows have in common.
  std::string plot_title() const {
    const auto shared = [&](const char* column, const auto& text) {
      const auto& first = rows_.front()[column];
      const bool same = std::all_of(rows_.begin(), rows_.end(), [&](const Row& r) { return r[column] == first; });
      return same ? ", " + text(first) : std::string();
    };
    return gpu_.name() + shared("pass", [](const auto& pass) { return pass.template get<std::string>(); }) +
           shared("head_dim", [](const auto& D) { return "head dim " + D.dump(); }) +
           shared("causal", [](const auto& causal) { return std::string(causal == 1 ? "causal" : "full"); });
  }

  // A line a step, pass and type, and where there is one a dashed line for the bound.
  std::vector<Series> plot_lines() const {
    std::map<std::string, Series> measured, bounds;
    const auto add = [](std::map<std::string, Series>& lines, const std::string& name, const Row& row, double tflops) {
      Series& line = lines[name];
      line.name = name;
      const double seq = row["seq"].get<double>();
      if (line.points.empty() || line.points.back().first < seq) line.points.emplace_back(seq, tflops);
    };
    for (const Row& row : rows_) {
      if (row["tflops"].is_null()) continue;
      const std::string pass = row["pass"].get<std::string>(), dtype = row["dtype"].get<std::string>();
      const double tflops = row["tflops"].get<double>();
      add(measured, row["step"].get<std::string>() + " " + pass + ", " + dtype, row, tflops);
      if (!row["bound_fraction"].is_null())
        add(bounds, "bound, " + pass + ", " + dtype, row, tflops / row["bound_fraction"].get<double>());
    }
    std::vector<Series> lines;
    for (const auto& [name, line] : measured) lines.push_back(line);
    for (auto& [name, line] : bounds) {
      line.dashed = true;
      lines.push_back(line);
    }
    return lines;
  }

  const BenchOptions& options_;
  Device& gpu_;
  Rates rates_;
  std::string inputs_key_;
  HostTensors inputs_;
  std::vector<Row> rows_;
  std::vector<std::string> notes_;
  Progress progress_;
};

}  // namespace

Command add_bench(CLI::App& command) {
  auto o = std::make_shared<BenchOptions>();
  o->steps.add_to(command);
  o->problem.add_shape_to(command);
  o->problem.add_rest_to(command);
  o->pass.add_to(command);
  o->format.add_to(command);
  add_number(command, "--idle", o->idle,
             "Seconds of rest before each problem, as a GPU that is busy for long slows itself down; default 0.2",
             Bounds{0.0, 60.0});
  add_number(command, "--launches", o->launches, "How many launches are timed; their median counts; default 11",
             Bounds{1, 10000});
  add_path(command, "--csv", o->csv, "Write the rows to this file, too");
  add_path(command, "--plot", o->plot, "Draw TFLOP/s by sequence length into this SVG file");
  return [o] {
    std::vector<std::filesystem::path> files;
    for (const std::string& file : {o->csv, o->plot})
      if (!file.empty()) files.push_back(file);
    require_writable(files);
    return Bench(*o).run();
  };
}

}  // namespace flash::cli
