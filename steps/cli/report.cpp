#include "cli/report.h"

#include <charconv>
#include <ostream>
#include <sstream>

#include "cli/options.h"

namespace flash::cli {
namespace {

Row row_of(const Item& item, const std::string& output, const reference::Verdict& verdict, const HowRun& options) {
  const Problem& p = item.problem;
  return {{"step", item.step->id},
          {"device", item.target == Target::gpu ? "gpu" : "cpu"},
          {"pass", name_of(item.pass)},
          {"dtype", flash::name_of(p.dtype)},
          {"batch", p.B},
          {"heads", p.Hq},
          {"kv_heads", p.Hkv},
          {"seq", p.Nq},
          {"seq_k", p.Nk},
          {"head_dim", p.D},
          {"causal", p.causal},
          {"scale", p.scale},
          {"dropout", p.dropout},
          {"output", output},
          {"error", verdict.error},
          {"allowed", verdict.allowed},
          {"max_error", verdict.max_error},
          {"max_allowed", verdict.max_allowed},
          {"ok", verdict.pass},
          {"reason", verdict.reason},
          {"again", repeat_command(item, options)}};
}

// As few digits as come to the same number again.
std::string exactly(double x) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof digits, x).ptr};
}

}  // namespace

std::string repeat_command(const Item& item, const HowRun& o) {
  const Problem& p = item.problem;
  std::ostringstream text;
  text << "flashsteps check " << item.step->id << " --pass " << name_of(item.pass) << " --batch " << p.B << " --heads "
       << p.Hq << " --kv-heads " << p.Hkv << " --seq " << p.Nq << " --seq-k " << p.Nk << " --head-dim " << p.D
       << " --dtype " << flash::name_of(p.dtype);
  if (p.causal) text << " --causal";
  if (p.deterministic) text << " --deterministic";
  if (p.quantisation.from != DType::bf16) text << " --from " << flash::name_of(p.quantisation.from);
  if (!p.quantisation.tile_scales) text << " --tensor-scales";
  if (!p.quantisation.rotation) text << " --no-rotation";
  if (p.scale != default_scale(p.D)) text << " --scale=" << exactly(p.scale);
  if (p.dropout > 0) text << " --dropout " << exactly(p.dropout);
  if (p.seed) text << " --seed " << p.seed;
  if (item.values != Values::normal) text << " --values " << flash::cli::name_of(item.values);
  if (o.sample) text << " --sample " << o.sample;
  if (o.cpu) text << " --device cpu";
  return text.str();
}

void Report::Tally::add(const Outcome& outcome) {
  problems++;
  failed += !outcome.pass;
  for (const auto& [name, v] : outcome.outputs) {
    const double r = v.allowed > 0 ? v.error / v.allowed : v.error > 0 ? 1e300 : 0;
    if (r > ratio) ratio = r, error = v.error, allowed = v.allowed, worst = name;
  }
}

void Report::add(const Item& item, const Outcome& outcome) {
  tallies_[{item.step->id, name_of(item.pass), flash::name_of(item.problem.dtype)}].add(outcome);
  if (format_ != Format::table) {
    for (const auto& [output, verdict] : outcome.outputs) rows_.push_back(row_of(item, output, verdict, options_));
    if (!outcome.fault.empty()) {
      reference::Verdict none;
      none.reason = outcome.fault;
      rows_.push_back(row_of(item, "", none, options_));
      for (const char* field : {"error", "allowed", "max_error", "max_allowed"}) rows_.back()[field] = nullptr;
    }
  }
  if (!outcome.pass) add_failure("FAILED  ", item, outcome);
}

void Report::add_smallest(const Item& item, const Outcome& outcome) { add_failure("least   ", item, outcome); }

void Report::add_failure(const std::string& title, const Item& item, const Outcome& outcome) {
  std::ostringstream text;
  text << title << item.step->id << " " << name_of(item.pass) << ", " << describe(item.problem);
  if (item.values != Values::normal) text << ", values " << flash::cli::name_of(item.values);
  text << "\n";
  for (const auto& [output, verdict] : outcome.outputs)
    if (!verdict.pass) text << "        " << verdict.reason << "\n";
  if (!outcome.fault.empty()) text << "        " << outcome.fault << "\n";
  text << "        again: " << repeat_command(item, options_) << "\n";
  failures_.push_back(text.str());
}

void Report::stop_after_loss(size_t not_made) {
  failures_.push_back("After this fault the GPU takes no more work from this process: " + std::to_string(not_made) +
                      " comparisons were not made. Run the rest again.\n");
}

bool Report::print(std::ostream& out, const std::string& first_line) const {
  bool all_pass = true;
  std::vector<Row> table;
  for (const auto& [key, t] : tallies_) {
    all_pass = all_pass && t.failed == 0;
    const auto& [step, pass, dtype] = key;
    table.push_back({{"step", step},
                     {"pass", pass},
                     {"dtype", dtype},
                     {"problems", t.problems},
                     {"failed", t.failed},
                     {"worst", t.worst},
                     {"error", t.ratio < 0 ? Row(nullptr) : Row(t.error)},
                     {"allowed", t.ratio < 0 ? Row(nullptr) : Row(t.allowed)},
                     {"", t.failed ? "FAILED" : "ok"}});
  }
  if (format_ == Format::table) {
    out << first_line << "\n\n";
    print_rows(out, Format::table, table);
    size_t shown = 0;
    for (const std::string& failure : failures_)
      if (shown++ < 20) out << (shown == 1 ? "\n" : "") << failure;
    if (shown > 20) out << "… and " << shown - 20 << " more; --format csv lists all\n";
  } else {
    print_rows(out, format_, rows_);
  }
  return all_pass;
}

}  // namespace flash::cli
