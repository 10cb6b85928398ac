// `flashsteps profile`: what each kernel does, counted by the CPU executor on any machine, beside what its chapter's
// page says that it must do.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>

#include "cli/commands.h"
#include "cli/files.h"
#include "cli/options.h"
#include "cli/plot.h"
#include "cli/verify.h"
#include "harness/closed_forms.h"
#include "harness/inputs.h"
#include "simt/executor.h"

namespace flash::cli {
namespace {

struct ProfileOptions {
  StepOption steps;
  ProblemOptions problem;
  PassOption pass;
  FormatOption format;
  bool lines = false;
  std::string plot;
};

Row ratio_or_none(double a, double b) { return b > 0 ? Row(a / b) : Row(nullptr); }

// The line's text, without the space around it; empty when the file is not there to be read.
std::string text_of_line(const simt::LineTraffic& line) {
  std::ifstream file(line.file);
  std::string text;
  for (int i = 0; i < line.number; i++)
    if (!std::getline(file, text)) return "";
  const size_t begin = text.find_first_not_of(" \t");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

// A kernel's name as its file has it: without the executor's own namespaces for CUDA's types.
std::string source_name(std::string name) {
  for (const char* inner : {"simt::observed::", "simt::plain::"})
    for (size_t at; (at = name.find(inner)) != std::string::npos;) name.erase(at, std::strlen(inner));
  return name;
}

// What one pass of one step did, a kernel at a time.
struct Profile {
  const RegisteredStep* step;
  Pass pass;
  Problem problem;
  size_t scratch_bytes;
  std::map<std::string, simt::Counters> kernels;
  std::vector<KernelBytes> expected;

  // The closed form for a kernel of this name, which may end in template arguments; null if there is none.
  const KernelBytes* expected_for(const std::string& kernel) const {
    const std::string name = kernel.substr(0, kernel.find('<'));
    for (const KernelBytes& k : expected)
      if (k.kernel == name) return &k;
    return nullptr;
  }
};

class Profiler {
 public:
  explicit Profiler(const ProfileOptions& options) : options_(options) {}

  int run() {
    if (!options_.plot.empty()) require_writable({options_.plot});
    std::string refusal;
    std::vector<std::string> left_out;
    for (const RegisteredStep* step : select_steps(options_.steps.prefixes))
      for (Pass pass : options_.pass.passes()) {
        if (!step->has(pass)) continue;
        const Problem p = problem_for(*step);
        const auto why = !step->builds.count(Target::cpu_observed)
                             ? step->id + " has no kernels: it is plain C++, and nothing of it is counted"
                             : why_unsupported(*step, p, pass);
        const auto too_large = why ? std::nullopt : why_too_large(cpu_device(), Target::cpu_observed, *step, pass, p);
        if (too_large) left_out.push_back(*too_large);
        if (!why && !too_large)
          profile(*step, pass, p);
        else if (refusal.empty())
          refusal = why ? *why : *too_large;
      }
    progress_.show("");
    if (profiles_.empty()) throw Error(refusal.empty() ? "no step has the pass that was asked for" : refusal);
    for (const std::string& why : left_out) std::cerr << "left out: " << why << "\n";
    if (options_.format.format == Format::table) {
      print_tables();
    } else {
      std::vector<Row> rows;
      for (const Profile& profile : profiles_)
        for (const Row& row : options_.lines ? line_rows(profile) : kernel_rows(profile)) rows.push_back(row);
      print_rows(std::cout, options_.format.format, rows);
    }
    std::cout.flush();  // the table is there, whatever becomes of the file
    if (!options_.plot.empty()) write_files({{options_.plot, bar_plot_svg(plot_title(), "MB", bars())}});
    return 0;
  }

 private:
  // The tour's problem with what was asked for put in.
  Problem problem_for(const RegisteredStep& step) const {
    const Step& info = step.info();
    Problem start;
    start.Hq = start.Hkv = 2;
    start.Nq = start.Nk = 256;
    start.dtype = info.dtypes.front();
    if (!std::count(info.head_dims.begin(), info.head_dims.end(), start.D)) start.D = info.head_dims.front();
    start.scale = default_scale(start.D);
    return options_.problem.apply(start);
  }

  void profile(const RegisteredStep& step, Pass pass, const Problem& p) {
    progress_.show(step.id + " " + name_of(pass) + ": " + describe(p));
    require_host_memory("profiling " + describe(p), (4.0 * double(p.q_elements()) + 4.0 * double(p.kv_elements())) * 8);
    HostTensors tensors = random_tensors(p, p.seed);
    if (pass == Pass::backward && !forward_of(step)) {  // from a forward pass: an O and LSE that belong together
      const RegisteredStep& forward = forward_before(step, p, DeviceKind::cpu);
      const HostTensors made =
          run_step(cpu_device(), *target_for(forward, DeviceKind::cpu, false), forward, Pass::forward, p, tensors)
              .tensors;
      tensors.O = made.O;
      tensors.LSE = made.LSE;
    }
    const StepResult result = run_step(cpu_device(), Target::cpu_observed, step, pass, p, tensors);
    std::map<std::string, simt::Counters> kernels;
    for (const auto& [name, counters] : simt::counters_by_kernel()) kernels[source_name(name)] += counters;
    if (kernels.empty()) kernels["(none: nothing to do)"];
    profiles_.push_back({&step, pass, p, result.scratch_bytes, kernels, closed_form(step, pass, p)});
  }

  static Row start_of_row(const Profile& profile, const std::string& kernel) {
    const Problem& p = profile.problem;
    return {{"step", profile.step->id},
            {"pass", name_of(profile.pass)},
            {"dtype", flash::name_of(p.dtype)},
            {"batch", p.B},
            {"heads", p.Hq},
            {"kv_heads", p.Hkv},
            {"seq", p.Nq},
            {"seq_k", p.Nk},
            {"head_dim", p.D},
            {"causal", p.causal},
            {"dropout", p.dropout},
            {"kernel", kernel}};
  }

  // Everything that was counted, for programs.
  static std::vector<Row> kernel_rows(const Profile& profile) {
    std::vector<Row> rows;
    for (const auto& [kernel, c] : profile.kernels) {
      const KernelBytes* expected = profile.expected_for(kernel);
      Row row = start_of_row(profile, kernel);
      const auto add = [&](const char* name, const Row& value) { row[name] = value; };
      add("launches", c.launches);
      add("global_read_bytes", c.global.read_bytes);
      add("global_write_bytes", c.global.write_bytes);
      add("page_read_bytes", expected ? Row(expected->read) : Row(nullptr));
      add("page_write_bytes", expected ? Row(expected->written) : Row(nullptr));
      add("ratio", expected ? ratio_or_none(double(c.global.read_bytes + c.global.write_bytes),
                                            expected->read + expected->written)
                            : Row(nullptr));
      uint64_t load_sectors = 0;
      for (const simt::SiteTraffic& site : c.sites)
        if (!site.shared && !site.write) load_sectors += site.traffic.transactions;
      add("global_requests", c.global.requests);
      add("global_load_sectors", load_sectors);
      add("global_store_sectors", c.global.transactions - load_sectors);
      add("global_ideal_sectors", c.global.ideal_transactions);
      add("shared_bytes", c.shared.read_bytes + c.shared.write_bytes);
      add("shared_requests", c.shared.requests);
      add("shared_wavefronts", c.shared.transactions);
      add("shared_ideal_wavefronts", c.shared.ideal_transactions);
      add("block_barriers", c.block_barriers);
      add("warp_barriers", c.warp_barriers);
      add("named_barriers", c.named_barriers);
      add("barrier_warps", c.barrier_warps);
      add("mbarrier_waits", c.mbarrier_waits);
      add("shuffles", c.shuffles);
      add("votes", c.votes);
      add("atomics", c.atomics);
      add("async_copies", c.async_copies);
      add("bulk_copies", c.bulk_copies);
      add("matrix_flops", c.matrix_flops);
      add("shared_memory_bytes", c.shared_memory);
      add("scratch_bytes", profile.scratch_bytes);
      rows.push_back(row);
    }
    return rows;
  }

  // The same for people: megabytes and ratios.
  static std::vector<Row> kernel_table(const Profile& profile) {
    std::vector<Row> rows;
    for (const auto& [kernel, c] : profile.kernels) {
      const KernelBytes* expected = profile.expected_for(kernel);
      const double bytes = double(c.global.read_bytes + c.global.write_bytes);
      rows.push_back({{"kernel", kernel.substr(0, kernel.find('<'))},
                      {"read MB", double(c.global.read_bytes) / 1e6},
                      {"written MB", double(c.global.write_bytes) / 1e6},
                      {"page MB", expected ? Row((expected->read + expected->written) / 1e6) : Row(nullptr)},
                      {"ratio", expected ? ratio_or_none(bytes, expected->read + expected->written) : Row(nullptr)},
                      {"sectors/request", ratio_or_none(double(c.global.transactions), double(c.global.requests))},
                      {"ideal", ratio_or_none(double(c.global.ideal_transactions), double(c.global.requests))},
                      {"shared MB", double(c.shared.read_bytes + c.shared.write_bytes) / 1e6},
                      {"conflicts", ratio_or_none(double(c.shared.transactions), double(c.shared.ideal_transactions))},
                      {"barriers", c.block_barriers + c.warp_barriers + c.named_barriers},
                      {"shuffles", c.shuffles},
                      {"atomics", c.atomics},
                      {"matrix MFLOP", double(c.matrix_flops) / 1e6},
                      {"shared KB", double(c.shared_memory) / 1024}});
    }
    return rows;
  }

  // The lines of source that touch memory, those with the most transactions beyond the ideal first, then the busiest.
  static std::vector<Row> line_rows(const Profile& profile) {
    std::vector<Row> rows;
    for (const auto& [kernel, counters] : profile.kernels) {
      auto lines = simt::traffic_by_line(counters);
      std::stable_sort(lines.begin(), lines.end(), [](const simt::LineTraffic& a, const simt::LineTraffic& b) {
        const auto key = [](const simt::LineTraffic& l) {
          return std::pair(l.traffic.transactions - std::min(l.traffic.transactions, l.traffic.ideal_transactions),
                           l.traffic.transactions);
        };
        return key(a) > key(b);
      });
      for (const simt::LineTraffic& line : lines) {
        Row row = start_of_row(profile, kernel);
        row["line"] = line.line;
        row["memory"] = line.shared ? "shared" : "global";
        row["access"] = line.write ? "write" : "read";
        row["bytes"] = line.traffic.read_bytes + line.traffic.write_bytes;
        row["requests"] = line.traffic.requests;
        row["transactions"] = line.traffic.transactions;
        row["ideal_transactions"] = line.traffic.ideal_transactions;
        row["text"] = text_of_line(line);
        rows.push_back(row);
      }
    }
    return rows;
  }

  static std::vector<Row> line_table(const Profile& profile) {
    std::vector<Row> rows;
    for (const Row& row : line_rows(profile)) {
      const double requests = row["requests"].get<double>();
      std::string text = row["text"].get<std::string>();
      if (text.size() > 70) text = text.substr(0, 69) + "…";
      rows.push_back({{"line", row["line"]},
                      {"memory", row["memory"]},
                      {"access", row["access"]},
                      {"MB", row["bytes"].get<double>() / 1e6},
                      {"requests", row["requests"]},
                      {"per request", ratio_or_none(row["transactions"].get<double>(), requests)},
                      {"ideal", ratio_or_none(row["ideal_transactions"].get<double>(), requests)},
                      {"text", text}});
    }
    return rows;
  }

  void print_tables() const {
    for (const Profile& profile : profiles_) {
      std::cout << profile.step->id << " " << name_of(profile.pass) << ", " << describe(profile.problem);
      if (profile.scratch_bytes >= 1024)
        std::cout << "; scratch " << (profile.scratch_bytes + 512) / 1024 << " KB";
      else if (profile.scratch_bytes > 0)
        std::cout << "; scratch " << profile.scratch_bytes << " bytes";
      std::cout << "\n";
      print_rows(std::cout, Format::table, options_.lines ? line_table(profile) : kernel_table(profile));
      std::cout << "\n";
    }
    if (options_.lines)
      std::cout
          << "per request: 32-byte sectors of global memory, or passes over the banks of shared memory, for each\n"
             "request of a warp; ideal: as few as its bytes could need. Worst first.\n";
    else
      std::cout
          << "MB: what the kernels ask of global memory, no cache assumed; page: the closed form of the chapter's\n"
             "page; conflicts: passes over the banks of shared memory against the fewest possible; shared KB: of a\n"
             "block. --lines tells which lines of source; --format csv has all that was counted.\n";
  }

  std::string plot_title() const {
    const Profile& first = profiles_.front();
    const bool same = std::all_of(profiles_.begin(), profiles_.end(), [&](const Profile& profile) {
      return profile.problem.D == first.problem.D && profile.problem.Nq == first.problem.Nq;
    });
    std::string text = "Bytes asked of HBM, counted";
    if (same)
      text += ": " + std::to_string(first.problem.Hq * first.problem.B) + " heads, N " +
              std::to_string(first.problem.Nq) + ", D " + std::to_string(first.problem.D);
    return text;
  }

  std::vector<Bar> bars() const {
    std::vector<Bar> bars;
    for (const Profile& profile : profiles_) {
      double counted = 0, expected = 0;
      for (const auto& [kernel, c] : profile.kernels) counted += double(c.global.read_bytes + c.global.write_bytes);
      for (const KernelBytes& k : profile.expected) expected += k.read + k.written;
      bars.push_back({profile.step->id + ", " + name_of(profile.pass), counted / 1e6,
                      profile.expected.empty() ? std::nullopt : std::optional(expected / 1e6)});
    }
    return bars;
  }

  const ProfileOptions& options_;
  std::vector<Profile> profiles_;
  Progress progress_;
};

}  // namespace

Command add_profile(CLI::App& command) {
  auto o = std::make_shared<ProfileOptions>();
  o->steps.add_to(command);
  o->problem.add_shape_to(command);
  o->problem.add_rest_to(command);
  o->pass.add_to(command);
  command.add_flag("--lines", o->lines, "The same by line of source, worst first");
  add_path(command, "--plot", o->plot, "Draw the steps' HBM bytes beside the closed forms into this SVG file");
  o->format.add_to(command);
  return [o] { return Profiler(*o).run(); };
}

}  // namespace flash::cli
