// The C interface (flashsteps.h) over the registry. Arguments are checked here; exceptions end here.
#include "flashsteps.h"

#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "harness/runner.h"

namespace flash {
namespace {

static_assert(int(DType::fp64) == FLASHSTEPS_FP64 && int(DType::fp32) == FLASHSTEPS_FP32 &&
              int(DType::fp16) == FLASHSTEPS_FP16 && int(DType::bf16) == FLASHSTEPS_BF16 &&
              int(DType::e4m3) == FLASHSTEPS_E4M3);

thread_local std::string last_error;

// Runs the body of an interface function and makes a return code of what it throws.
template <class F>
int guarded(F body) noexcept {
  try {
    last_error.clear();
    body();
    return FLASHSTEPS_OK;
  } catch (const Error& e) {
    last_error = one_line(e.what());
    return FLASHSTEPS_REFUSED;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory on the host";
    return FLASHSTEPS_REFUSED;
  } catch (const std::exception& e) {
    last_error = one_line(e.what());
    return FLASHSTEPS_FAULT;
  }
}

// ---- Arguments

template <class T>
T& required(T* pointer, const char* name) {
  if (!pointer) throw Error(std::string(name) + ": is a null pointer");
  return *pointer;
}

// One of the values an interface constant may have.
int one_of(int value, int count, const char* name) {
  if (value >= 0 && value < count) return value;
  throw Error(std::string(name) + ": " + std::to_string(value) + " is no value of it; allowed are 0 to " +
              std::to_string(count - 1) + ", see flashsteps.h");
}

Pass pass_of(int pass) { return one_of(pass, 2, "pass") == FLASHSTEPS_FORWARD ? Pass::forward : Pass::backward; }

Problem problem_of(const flashsteps_problem* given) {
  const flashsteps_problem& g = required(given, "problem");
  Problem p;
  p.B = g.batch, p.Hq = g.heads, p.Hkv = g.kv_heads, p.Nq = g.seq_q, p.Nk = g.seq_k, p.D = g.head_dim;
  p.scale = g.scale;
  p.causal = one_of(g.causal, 2, "causal");
  p.dropout = g.dropout, p.seed = g.seed, p.offset = g.offset;
  p.dtype = DType(one_of(g.dtype, 5, "dtype"));
  p.deterministic = one_of(g.deterministic, 2, "deterministic");
  validate(p);
  return p;
}

const RegisteredStep& step_named(const char* name) {
  const auto meant = select_steps({&required(name, "step")});
  if (meant.size() == 1) return *meant.front();
  std::string ids;
  for (const RegisteredStep* step : meant) ids += (ids.empty() ? "" : ", ") + step->id;
  throw Error("step: '" + std::string(name) + "' means " + std::to_string(meant.size()) + " steps: " + ids +
              "; give one of these ids");
}

// ---- What there is

flashsteps_step description_of(const RegisteredStep& step) {
  struct Lists {
    const RegisteredStep* step;
    std::vector<int> dtypes;
  };
  static std::mutex mutex;
  static std::deque<Lists> known;  // a deque, since callers keep pointers into it
  const Step& s = step.info();
  const std::lock_guard lock(mutex);
  const Lists* lists = nullptr;
  for (const Lists& l : known)
    if (l.step == &step) lists = &l;
  if (!lists) {
    Lists made{&step, {}};
    for (DType type : s.dtypes) made.dtypes.push_back(int(type));
    lists = &known.emplace_back(std::move(made));
  }
  flashsteps_step d{};
  d.id = step.id.c_str();
  d.idea = s.idea.c_str();
  d.dtypes = lists->dtypes.data(), d.dtype_count = int(lists->dtypes.size());
  d.head_dims = s.head_dims.data(), d.head_dim_count = int(s.head_dims.size());
  d.forward = step.has(Pass::forward), d.backward = step.has(Pass::backward);
  d.causal = s.causal, d.dropout = s.dropout, d.kv_heads = s.kv_heads;
  d.min_sm = s.min_sm;
  d.on_cpu = step.builds.count(Target::host) || step.builds.count(Target::cpu);
  d.on_gpu = step.builds.count(Target::gpu) > 0;
  const RegisteredStep* forward = step.has(Pass::backward) ? forward_of(step) : nullptr;
  d.saved_by = forward ? forward->id.c_str() : nullptr;
  return d;
}

// ---- One call

enum class Use { input, output, scratch };

// One of the caller's arrays, as the pass uses it.
struct Array {
  const char* name;
  void* memory;
  size_t bytes;
  Use use;
  size_t alignment = 16;  // of the address, on the GPU
};

// Several named pieces of workspace in one array of the caller's.
class Pieces {
 public:
  static constexpr size_t kAlignment = 256;

  // The pieces of a step that its backward pass reads (`saved`), or the others.
  Pieces(const Step* step, const Problem& p, bool saved) {
    if (!step || !step->workspace) return;
    for (const Workspace& w : step->workspace(p)) {
      if (w.saved != saved) continue;
      bytes_ = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
      begins_.emplace_back(w.name, bytes_);
      bytes_ += w.bytes;
    }
  }

  size_t bytes() const { return bytes_; }
  void place(void* memory, Tensors& t) const {
    for (const auto& [name, begin] : begins_) t.workspace[name] = static_cast<unsigned char*>(memory) + begin;
  }

 private:
  std::vector<std::pair<std::string, size_t>> begins_;
  size_t bytes_ = 0;
};

// A pass of a step on a device, which the step is known to support.
class Call {
 public:
  Call(const char* step, int pass, int device, const flashsteps_problem* problem)
      : step_(step_named(step)),
        pass_(pass_of(pass)),
        on_gpu_(one_of(device, 2, "device") == FLASHSTEPS_GPU),
        problem_(problem_of(problem)),
        build_(possible_build()),
        workspace_(build_, problem_, false),
        saved_(saving_build(), problem_, true) {}

  size_t workspace_bytes() const { return workspace_.bytes(); }
  size_t saved_bytes() const { return saved_.bytes(); }

  void run(const flashsteps_tensors& t, Stream stream) const { on_gpu_ ? run_on_gpu(t, stream) : run_on_cpu(t); }

 private:
  // The step's build for the device; refuses what cannot run.
  const Step* possible_build() const {
    if (const auto why = why_unsupported(step_, problem_, pass_)) throw Error(*why);
    const Step* build = build_of(step_);
    if (!build) throw Error(step_.id + " has no code for the " + (on_gpu_ ? "GPU" : "CPU") + " in this library");
    std::string why;
    if (on_gpu_ && !gpu_device(&why)) throw Error(why);
    return build;
  }

  const Step* build_of(const RegisteredStep& step) const {
    const auto target = target_for(step, on_gpu_ ? DeviceKind::gpu : DeviceKind::cpu, /*observe=*/false);
    return target ? &step.builds.at(*target) : nullptr;
  }

  // The build whose forward pass saves what this call writes or reads; null if nothing is saved.
  const Step* saving_build() const {
    if (pass_ == Pass::forward) return build_;
    const RegisteredStep* forward = forward_of(step_);
    return forward ? build_of(*forward) : nullptr;
  }

  // The caller's arrays in the order of flashsteps_tensors, then `saved` and `workspace`.
  std::vector<Array> arrays_of(const flashsteps_tensors& t) const {
    const size_t q = problem_.q_elements() * bytes_of(input_dtype(problem_));
    const size_t o = problem_.q_elements() * bytes_of(output_dtype(problem_));
    const size_t kv = problem_.kv_elements() * bytes_of(input_dtype(problem_));
    const size_t lse = problem_.query_rows() * (problem_.dtype == DType::fp64 ? 8 : 4);
    const bool forward = pass_ == Pass::forward;
    const Use result = forward ? Use::output : Use::input;
    const auto input = [](const void* memory) { return const_cast<void*>(memory); };
    std::vector<Array> arrays = {{"q", input(t.q), q, Use::input},
                                 {"k", input(t.k), kv, Use::input},
                                 {"v", input(t.v), kv, Use::input},
                                 {"o", t.o, o, result},
                                 {"lse", t.lse, lse, result}};
    if (!forward) {
      arrays.push_back({"d_o", input(t.d_o), q, Use::input});
      arrays.push_back({"dq", t.dq, q, Use::output});
      arrays.push_back({"dk", t.dk, kv, Use::output});
      arrays.push_back({"dv", t.dv, kv, Use::output});
    }
    arrays.push_back({"saved", t.saved, saved_.bytes(), result, Pieces::kAlignment});
    arrays.push_back({"workspace", t.workspace, workspace_.bytes(), Use::scratch, Pieces::kAlignment});
    for (const Array& a : arrays)
      if (a.bytes > 0 && !a.memory && (on_gpu_ || a.use != Use::scratch))
        throw Error(std::string(a.name) + ": is a null pointer; the pass needs " + std::to_string(a.bytes) + " bytes");
    return arrays;
  }

  // Runs the pass on arrays at these addresses of the device, in the order of arrays_of().
  void pass_at(const std::vector<void*>& at, Stream stream) const {
    Tensors t;
    t.Q = at[0], t.K = at[1], t.V = at[2], t.O = at[3], t.LSE = at[4];
    if (pass_ == Pass::backward) t.dO = at[5], t.dQ = at[6], t.dK = at[7], t.dV = at[8];
    saved_.place(at[at.size() - 2], t);
    workspace_.place(at.back(), t);
    if (pass_ == Pass::forward && build_->quantise) build_->quantise(problem_, t, stream);
    (pass_ == Pass::forward ? build_->forward : build_->backward)(problem_, t, stream);
  }

  void run_on_gpu(const flashsteps_tensors& given, Stream stream) const {
    std::optional<int> gpu;
    std::vector<void*> at;
    for (const Array& a : arrays_of(given)) {
      at.push_back(a.memory);
      if (a.bytes == 0) continue;
      if (reinterpret_cast<uintptr_t>(a.memory) % a.alignment)
        throw Error(std::string(a.name) + ": its address must be a multiple of " + std::to_string(a.alignment));
      const int holder = gpu_holding(a.memory, a.name);
      if (gpu.value_or(holder) != holder)
        throw Error(std::string(a.name) + ": lies on GPU " + std::to_string(holder) + ", the arrays before it on GPU " +
                    std::to_string(*gpu) + "; all must lie on one");
      gpu = holder;
    }
    const CurrentGpu current(gpu);
    pass_at(at, stream);
  }

  // Copies everything into the executor's memory, whose guard zones show a kernel that writes past an array.
  void run_on_cpu(const flashsteps_tensors& given) const {
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    Device& cpu = cpu_device();
    const std::vector<Array> arrays = arrays_of(given);
    std::vector<Buffer> buffers;
    std::vector<void*> at;
    for (const Array& a : arrays) {
      at.push_back(buffers.emplace_back(cpu, a.name, a.bytes).data());
      if (a.use == Use::input)
        cpu.upload(at.back(), a.memory, a.bytes);
      else
        cpu.poison(at.back(), a.bytes);
    }
    pass_at(at, nullptr);
    cpu.synchronize();
    for (const Buffer& buffer : buffers) buffer.check_guards();
    for (size_t i = 0; i < arrays.size(); i++)
      if (arrays[i].use == Use::output) cpu.download(arrays[i].memory, at[i], arrays[i].bytes);
  }

  const RegisteredStep& step_;
  Pass pass_;
  bool on_gpu_;
  Problem problem_;
  const Step* build_;
  Pieces workspace_, saved_;
};

}  // namespace
}  // namespace flash

// ---- The interface

using namespace flash;

extern "C" {

int flashsteps_interface(void) { return FLASHSTEPS_INTERFACE; }

int flashsteps_step_count(void) {
  int count = 0;
  guarded([&] { count = int(all_steps().size()); });  // of a step that is not complete the error tells
  return count;
}

int flashsteps_get_step(int index, flashsteps_step* step) {
  return guarded([&] {
    required(step, "step") = description_of(all_steps()[size_t(one_of(index, flashsteps_step_count(), "index"))]);
  });
}

int flashsteps_find_step(const char* name, flashsteps_step* step) {
  return guarded([&] { required(step, "step") = description_of(step_named(name)); });
}

int flashsteps_supports(const char* step, int pass, int device, const flashsteps_problem* problem) {
  return guarded([&] { Call(step, pass, device, problem); });
}

int flashsteps_memory_needed(const char* step, int pass, int device, const flashsteps_problem* problem,
                             size_t* workspace, size_t* saved) {
  return guarded([&] {
    const Call call(step, pass, device, problem);
    size_t &own = required(workspace, "workspace"), &kept = required(saved, "saved");
    own = call.workspace_bytes();
    kept = call.saved_bytes();
  });
}

int flashsteps_run(const char* step, int pass, int device, const flashsteps_problem* problem,
                   const flashsteps_tensors* tensors, void* stream) {
  return guarded(
      [&] { Call(step, pass, device, problem).run(required(tensors, "tensors"), static_cast<Stream>(stream)); });
}

const char* flashsteps_last_error(void) { return last_error.c_str(); }
}
