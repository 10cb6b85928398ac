// The GPU as a Device: memory with guard zones, transfers, event timing; and the checks before a launch.
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "harness/cuda_target.h"
#include "harness/device.h"

namespace flash {
namespace {

constexpr unsigned char kGuard = 0xa5;

std::string megabytes(size_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MB"; }

class GpuDevice : public Device {
 public:
  explicit GpuDevice(const cudaDeviceProp& properties) : properties_(properties) {}

  DeviceKind kind() const override { return DeviceKind::gpu; }
  std::string name() const override { return properties_.name; }
  int sm() const override { return properties_.major * 10 + properties_.minor; }

  size_t free_bytes() const override {
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "asking for free GPU memory");
    return free;
  }

  void* allocate(size_t bytes) override {
    const size_t before = kGuardBytes;  // a multiple of 1024, as cudaMalloc's own alignment is of 256
    void* raw = nullptr;
    const cudaError_t status = cudaMalloc(&raw, before + bytes + kGuardBytes + 1024);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // an error that is reported here must not surface again at the next launch
      throw Error("needs " + megabytes(bytes) + " of GPU memory, " + megabytes(free_bytes()) +
                  " are free; choose a smaller problem");
    }
    check_cuda(status, "cudaMalloc");
    const auto aligned = (reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024;
    auto* memory = reinterpret_cast<unsigned char*>(aligned + before);
    blocks_[memory] = {raw, bytes};
    check_cuda(cudaMemset(memory - kGuardBytes, kGuard, kGuardBytes), "filling a guard zone");
    check_cuda(cudaMemset(memory + bytes, kGuard, kGuardBytes), "filling a guard zone");
    return memory;
  }

  void release(void* memory) noexcept override {
    const auto it = blocks_.find(memory);
    if (it == blocks_.end()) return;
    cudaFree(it->second.raw);
    blocks_.erase(it);
  }

  bool guards_intact(const void* memory) override {
    const Block& block = blocks_.at(const_cast<void*>(memory));
    const auto* begin = static_cast<const unsigned char*>(memory);
    const std::vector<unsigned char> expected(kGuardBytes, kGuard);
    std::vector<unsigned char> found(kGuardBytes);
    for (const unsigned char* zone : {begin - kGuardBytes, begin + block.bytes}) {
      download(found.data(), zone, kGuardBytes);
      if (found != expected) return false;
    }
    return true;
  }

  void upload(void* to, const void* from, size_t bytes) override {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copying to the GPU");
  }
  void download(void* to, const void* from, size_t bytes) override {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copying from the GPU");
  }
  void poison(void* memory, size_t bytes) override {
    check_cuda(cudaMemset(memory, 0xff, bytes), "filling GPU memory");
  }

  bool lost() override { return cudaDeviceSynchronize() != cudaSuccess; }

  void synchronize() override { check_cuda(cudaDeviceSynchronize(), "running a kernel"); }

  std::vector<double> times_ms(int count, const std::function<void(int)>& work) override {
    const std::vector<Event> events(size_t(count) * 2);
    for (int i = 0; i < count; i++) {
      check_cuda(cudaEventRecord(events[2 * size_t(i)].event), "cudaEventRecord");
      work(i);
      check_cuda(cudaEventRecord(events[2 * size_t(i) + 1].event), "cudaEventRecord");
    }
    synchronize();
    std::vector<double> times;
    for (size_t i = 0; i < events.size(); i += 2) {
      float ms = 0;
      check_cuda(cudaEventElapsedTime(&ms, events[i].event, events[i + 1].event), "cudaEventElapsedTime");
      times.push_back(ms);
    }
    return times;
  }

 private:
  struct Block {
    void* raw;
    size_t bytes;
  };
  struct Event {
    cudaEvent_t event{};
    Event() { check_cuda(cudaEventCreate(&event), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
  };
  cudaDeviceProp properties_;
  std::map<void*, Block> blocks_;
};

// Dotted, as NVIDIA prints versions: 13000 → 13.0
std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// What stands between this program and a GPU, in a line; empty if nothing does.
std::string missing() {
  int driver = 0, runtime = 0, count = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) return "there is no NVIDIA driver on this machine";
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver)
    return "the NVIDIA driver is for CUDA " + cuda_version(driver) + " and this program was built with CUDA " +
           cuda_version(runtime) + "; update the driver or build with an older toolkit";
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) return "there is no NVIDIA GPU here";
  if (status != cudaSuccess) return std::string("the GPU cannot be used: ") + cudaGetErrorString(status);
  return "";
}

}  // namespace

inline namespace gpu {

// What the GPU in use can do.
static const cudaDeviceProp& gpu_limits() {
  static std::mutex mutex;
  static std::map<int, cudaDeviceProp> known;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  const auto entry = known.find(device);
  if (entry != known.end()) return entry->second;
  cudaDeviceProp limits{};
  check_cuda(cudaGetDeviceProperties(&limits, device), "cudaGetDeviceProperties");
  return known.emplace(device, limits).first->second;
}

size_t shared_memory_limit() { return gpu_limits().sharedMemPerBlockOptin; }

int multiprocessors() { return gpu_limits().multiProcessorCount; }

void check_launch(const void* kernel, dim3 grid, dim3 block, size_t smem_bytes) {
  const cudaDeviceProp& limits = gpu_limits();
  if (grid.x > 2147483647u || grid.y > 65535u || grid.z > 65535u)
    throw LaunchError("launch: a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
                      std::to_string(grid.z) + " blocks; a GPU takes at most 2147483647 x 65535 x 65535");
  cudaFuncAttributes needs{};
  const cudaError_t status = cudaFuncGetAttributes(&needs, kernel);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    throw Error("this build has no code of the kernel for an sm_" + std::to_string(limits.major * 10 + limits.minor) +
                " GPU; configure with -DFLASHSTEPS_GPU=native, or use --device cpu");
  }
  check_cuda(status, "asking for a kernel's needs");
  const size_t smem = needs.sharedSizeBytes + smem_bytes;
  if (smem > limits.sharedMemPerBlockOptin)
    throw LaunchError("launch: the kernel needs " + std::to_string(smem) +
                      " bytes of shared memory a block, this GPU has " + std::to_string(limits.sharedMemPerBlockOptin) +
                      "; use --device cpu or a smaller tile");
  const size_t threads = size_t(block.x) * block.y * block.z;
  if (threads == 0 || block.x > 1024 || block.y > 1024 || block.z > 64)
    throw LaunchError("launch: a block of " + std::to_string(block.x) + " x " + std::to_string(block.y) + " x " +
                      std::to_string(block.z) + " threads; from 1 to 1024 in all, and at most 1024 x 1024 x 64");
  if (threads > size_t(needs.maxThreadsPerBlock))
    throw LaunchError("launch: a block of " + std::to_string(threads) + " threads; with " +
                      std::to_string(needs.numRegs) + " registers a thread this GPU runs the kernel with at most " +
                      std::to_string(needs.maxThreadsPerBlock));
  // More than 48 KB is granted on request only. (CUDA C++ Programming Guide, compute capability 7.x, Shared Memory.)
  if (smem_bytes > size_t(needs.maxDynamicSharedSizeBytes))
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem_bytes)),
               "asking for " + std::to_string(smem_bytes) + " bytes of shared memory");
}

}  // namespace gpu

Device* gpu_device(std::string* why) {
  static std::string reason;
  static const std::unique_ptr<Device> device = []() -> std::unique_ptr<Device> {
    reason = missing();
    if (!reason.empty()) return nullptr;
    cudaDeviceProp properties{};
    const cudaError_t status = cudaGetDeviceProperties(&properties, 0);
    if (status != cudaSuccess) {
      reason = std::string("the GPU cannot be used: ") + cudaGetErrorString(status);
      return nullptr;
    }
    return std::make_unique<GpuDevice>(properties);
  }();
  if (why) *why = reason;
  return device.get();
}

int gpu_holding(const void* memory, const std::string& name) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, memory), name + ": asking where it lies");
  if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged)
    throw Error(name + ": lies in host memory; the GPU needs it in its own");
  return attributes.device;
}

CurrentGpu::CurrentGpu(std::optional<int> number) {
  if (!number) return;
  int current = 0;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  if (current == *number) return;
  check_cuda(cudaSetDevice(*number), "cudaSetDevice");
  before_ = current;
}

CurrentGpu::~CurrentGpu() {
  if (before_) cudaSetDevice(*before_);
}

}  // namespace flash
