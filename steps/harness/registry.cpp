#include "harness/registry.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <tuple>

namespace flash {
namespace {

// Filled by the constructors of static Registration objects, hence made on first use.
std::vector<RegisteredStep>& mutable_steps() {
  static std::vector<RegisteredStep> steps;
  return steps;
}

// ".../02_naive_gpu/forward.cu" → "02_naive_gpu/forward"
std::string id_of(const std::string& file) {
  const size_t slash = file.rfind('/');
  const size_t before = slash == std::string::npos || slash == 0 ? std::string::npos : file.rfind('/', slash - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  return file.substr(begin, file.rfind('.') - begin);
}

bool starts_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

// Whether a prefix as typed ("05", "08/ping", "07_warp/back") means this id.
bool means(const std::string& prefix, const std::string& id) {
  if (prefix.empty() || prefix[0] == '/') return false;
  const size_t slash = prefix.find('/');
  if (slash == std::string::npos) return starts_with(id, prefix);
  const size_t id_slash = id.find('/');
  return starts_with(id.substr(0, id_slash), prefix.substr(0, slash)) &&
         starts_with(id.substr(id_slash + 1), prefix.substr(slash + 1));
}

// 1 2 3 4 8 → "1-4, 8"
std::string ranges(const std::vector<int>& numbers) {
  std::ostringstream text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i;
    while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) end++;
    text << (i ? ", " : "") << numbers[i];
    if (end > i) text << "-" << numbers[end];
    i = end + 1;
  }
  return text.str();
}

}  // namespace

const std::vector<RegisteredStep>& complete(const std::vector<RegisteredStep>& steps) {
  for (const RegisteredStep& step : steps)
    for (const auto& [target, build] : step.builds) {
      const auto require = [&](bool there, const char* what) {
        if (!there)
          throw Error(step.id + ": its registration has no " + what + "; give it what steps/harness/step.h says");
      };
      require(!build.dtypes.empty(), ".dtypes");
      require(!build.head_dims.empty(), ".head_dims");
      require(build.forward || build.backward, ".forward and no .backward");
    }
  return steps;
}

Registration::Registration(const char* file, Target target, Step step) {
  const std::string id = id_of(file);
  auto& steps = mutable_steps();
  for (RegisteredStep& known : steps)
    if (known.id == id) {
      known.builds.insert_or_assign(target, std::move(step));
      return;
    }
  steps.push_back({id, {{target, std::move(step)}}});
  std::sort(steps.begin(), steps.end(), [](const RegisteredStep& a, const RegisteredStep& b) {
    return std::make_tuple(a.chapter(), a.info().rung, a.id) < std::make_tuple(b.chapter(), b.info().rung, b.id);
  });
}

void* Tensors::address_of(const char* name) const {
  const auto it = workspace.find(name);
  if (it == workspace.end())
    throw LaunchError("there is no workspace '" + std::string(name) + "'; ask for it in .workspace");
  return it->second;
}

unsigned checked_grid_length(size_t blocks) {
  if (blocks > 2147483647)
    throw Error("launch: needs " + std::to_string(blocks) +
                " blocks, a grid has at most 2147483647; choose a smaller batch or sequence");
  return unsigned(blocks);
}

std::vector<int> head_dims_up_to(int largest) {
  std::vector<int> dims(static_cast<size_t>(largest));
  for (int d = 1; d <= largest; d++) dims[static_cast<size_t>(d - 1)] = d;
  return dims;
}

std::string head_dims_text(const Step& step) { return ranges(step.head_dims); }

const std::vector<RegisteredStep>& all_steps() {
  static const std::vector<RegisteredStep>& steps = complete(mutable_steps());
  return steps;
}

std::vector<const RegisteredStep*> select_steps(const std::vector<std::string>& prefixes) {
  std::set<const RegisteredStep*> chosen;
  for (const std::string& prefix : prefixes) {
    std::set<const RegisteredStep*> meant;
    std::string ids;
    for (const RegisteredStep& step : all_steps()) {
      ids += (ids.empty() ? "" : ", ") + step.id;
      if (step.id == prefix) {  // a whole id means that step, also where it is the beginning of another
        meant = {&step};
        break;
      }
      if (means(prefix, step.id)) meant.insert(&step);
    }
    if (meant.empty()) throw Error("there is no step '" + prefix + "'; give a prefix of one of: " + ids);
    chosen.insert(meant.begin(), meant.end());
  }
  std::vector<const RegisteredStep*> in_order;
  for (const RegisteredStep& step : all_steps())
    if (prefixes.empty() || chosen.count(&step)) in_order.push_back(&step);
  return in_order;
}

const RegisteredStep* forward_of(const RegisteredStep& step) {
  if (step.has(Pass::forward)) return &step;
  if (step.info().reads_saved.empty()) return nullptr;
  for (const RegisteredStep& other : all_steps()) {
    if (other.chapter() != step.chapter() || !other.has(Pass::forward) || !other.info().workspace) continue;
    for (const Workspace& w : other.info().workspace(Problem{}))
      if (w.saved && w.name == step.info().reads_saved.front()) return &other;
  }
  throw Error(step.id + ": no forward step of chapter " + step.chapter() + " saves '" +
              step.info().reads_saved.front() + "'; mark it .saved in that step's workspace");
}

std::optional<std::string> why_unsupported(const RegisteredStep& step, const Problem& p, Pass pass) {
  const Step& s = step.info();
  const auto refusal = [&](const std::string& what) { return step.id + " does not support " + what; };
  if (!step.has(pass)) {
    const bool wants_forward = pass == Pass::forward;
    return refusal(wants_forward ? "the forward pass; it has the backward pass only"
                                 : "the backward pass; it has the forward pass only");
  }
  if (std::find(s.dtypes.begin(), s.dtypes.end(), p.dtype) == s.dtypes.end()) {
    std::string names;
    for (DType t : s.dtypes) names += (names.empty() ? "" : ", ") + name_of(t);
    return refusal(name_of(p.dtype) + "; supported: " + names);
  }
  if (std::find(s.head_dims.begin(), s.head_dims.end(), p.D) == s.head_dims.end())
    return refusal("head dim " + std::to_string(p.D) + "; supported: " + ranges(s.head_dims));
  if (p.causal && !s.causal) return refusal("a causal mask; run it without --causal");
  if (p.dropout > 0 && !s.dropout) return refusal("dropout; run it with --dropout 0");
  if (p.Hkv != p.Hq && !s.kv_heads) return refusal("grouped key/value heads; run it with --kv-heads equal to --heads");
  return std::nullopt;
}

}  // namespace flash
