// The CPU executor as a device of the harness.
#include <chrono>
#include <new>

#include "harness/device.h"
#include "harness/error.h"
#include "simt/executor.h"

namespace flash {
namespace {

class CpuDevice final : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::cpu; }
  std::string name() const override {
    const int workers = simt::worker_count();
    return "CPU executor (" + std::to_string(workers) + (workers == 1 ? " thread)" : " threads)");
  }
  size_t free_bytes() const override { return simt::available_bytes(); }

  double taken_bytes(double array, bool observed) const override { return simt::memory_of_array(array, observed); }

  void* allocate(size_t bytes) override {
    static_assert(kGuardBytes == simt::kGuardBytes);
    const size_t free = free_bytes();
    const auto refuse = [&] {
      throw Error(
          "out of memory: " + std::to_string(bytes) +
          " bytes asked for, which take twice as many (the executor notes beside each whether it is written), " +
          std::to_string(free) + " are free; choose a smaller problem");
    };
    if (taken_bytes(double(bytes), false) > double(free)) refuse();  // before the system kills somebody for it
    try {
      return simt::allocate(bytes);
    } catch (const std::bad_alloc&) {
      refuse();
    }
    return nullptr;
  }
  void release(void* memory) noexcept override { simt::free(memory); }
  bool guards_intact(const void* memory) override { return simt::guards_intact(memory); }
  void upload(void* to, const void* from, size_t bytes) override { simt::write(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { simt::read(to, from, bytes); }
  void poison(void* memory, size_t bytes) override { simt::poison(memory, bytes); }

  void synchronize() override {}  // a launch returns, or throws, when it is done

  std::vector<double> times_ms(int count, const std::function<void(int)>& work) override {
    std::vector<double> times;
    for (int i = 0; i < count; i++) {
      const auto start = std::chrono::steady_clock::now();
      work(i);
      times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    return times;
  }

  void reset_traffic() override { simt::reset_counters(); }
  std::optional<Traffic> traffic() const override {
    const simt::Traffic& global = simt::counters().global;
    return Traffic{global.read_bytes, global.write_bytes};
  }
};

}  // namespace

Device& cpu_device() {
  static CpuDevice device;
  return device;
}

}  // namespace flash
