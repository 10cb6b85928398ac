#include <utility>

#include "harness/device.h"

namespace flash {

Buffer::Buffer(Device& device, std::string name, size_t bytes)
    : device_(&device), name_(std::move(name)), bytes_(bytes) {
  try {
    data_ = device.allocate(bytes);
  } catch (const Error& e) {
    throw Error(name_ + ": " + e.what());
  }
}

Buffer::Buffer(Buffer&& other) noexcept
    : device_(other.device_),
      name_(std::move(other.name_)),
      bytes_(other.bytes_),
      data_(std::exchange(other.data_, nullptr)) {}

Buffer::~Buffer() {
  if (data_) device_->release(data_);
}

void Buffer::check_guards() const {
  if (!device_->guards_intact(data_))
    throw KernelFault("a kernel wrote outside the " + std::to_string(bytes_) + " bytes of " + name_);
}

}  // namespace flash
