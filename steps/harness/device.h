// A device as the host program sees it: memory, transfers, time. There are two, the GPU and the CPU executor.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/step.h"

namespace flash {

enum class DeviceKind { cpu, gpu };

// Bytes that kernels asked of global memory, every request counted, as if there were no caches.
struct Traffic {
  uint64_t read_bytes = 0;
  uint64_t write_bytes = 0;
};

class Device {
 public:
  static constexpr size_t kGuardBytes = 64 << 10;

  virtual ~Device() = default;
  virtual DeviceKind kind() const = 0;
  virtual std::string name() const = 0;
  virtual int sm() const { return 0; }  // compute capability times ten: 90. 0 for the CPU
  virtual size_t free_bytes() const = 0;
  // What an array of so many bytes takes of them; `observed`: with what the executor keeps for observed kernels.
  virtual double taken_bytes(double array, bool /*observed*/) const { return array + 2.0 * kGuardBytes; }

  // Memory aligned to 1024 bytes between two guard zones of kGuardBytes. Throws Error, with the bytes asked for and
  // the bytes free, when there is not enough. Freed by release().
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) noexcept = 0;
  // Whether nobody has written to the guard zones around `memory`.
  virtual bool guards_intact(const void* memory) = 0;

  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;
  // Sets every byte to 0xff, which is a NaN in every floating-point type here; to the observer it is unwritten memory.
  virtual void poison(void* memory, size_t bytes) = 0;

  // Waits for all launches. Throws KernelFault if one of them failed.
  virtual void synchronize() = 0;
  // Whether nothing works any more in this process: the device was reset or unplugged, or a kernel did what ends the
  // work of all (a GPU's "illegal memory access").
  virtual bool lost() { return false; }
  // Milliseconds that the work launched by each of work(0), work(1), … work(count − 1) takes on the device. Launches
  // are queued one behind the other, so that a short kernel does not wait for the host.
  virtual std::vector<double> times_ms(int count, const std::function<void(int)>& work) = 0;

  // What kernels compiled as Target::cpu_observed have moved since the last reset; nothing on a GPU.
  virtual void reset_traffic() {}
  virtual std::optional<Traffic> traffic() const { return std::nullopt; }
};

// The CPU executor; also runs Target::host steps.
Device& cpu_device();

// The GPU in use, or null; then `why` says in one line what is missing (no CUDA in this build, no driver, no GPU, …).
Device* gpu_device(std::string* why);

// The number of the GPU that holds this memory. Throws Error where none does, with `name` for what was to be there.
int gpu_holding(const void* memory, const std::string& name);

// Makes a GPU the calling thread's current one until the end of the scope; with no number leaves it as it is.
class CurrentGpu {
 public:
  explicit CurrentGpu(std::optional<int> number);
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;
  ~CurrentGpu();

 private:
  std::optional<int> before_;
};

// An array in device memory, freed at the end of its scope.
class Buffer {
 public:
  Buffer(Device& device, std::string name, size_t bytes);
  Buffer(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }
  // Throws KernelFault if a guard zone was written to.
  void check_guards() const;

 private:
  Device* device_;
  std::string name_;
  size_t bytes_;
  void* data_;
};

}  // namespace flash
