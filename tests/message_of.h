// What an action is refused with.
#pragma once
#include <functional>
#include <stdexcept>
#include <string>

namespace flash::tests {

// The message of the error that `action` throws; empty if it throws none.
inline std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

}  // namespace flash::tests
