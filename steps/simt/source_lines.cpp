// Finds lines of source for code addresses, by the program addr2line of binutils.
#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "simt/executor.h"
#include "simt/symbols.h"

namespace simt {
namespace {

std::mutex mutex;
std::map<const void*, std::string> known;  // "…/02_naive_gpu/forward.cu:88", or "?"

// "…/02_naive_gpu/forward.cu:88 (discriminator 2)" without what follows the number; "?" for a line that is not known.
std::string place_of(const std::string& frame) {
  const size_t colon = frame.rfind(':');
  if (frame.empty() || frame[0] == '?' || colon == std::string::npos || colon + 1 >= frame.size()) return "?";
  if (frame[colon + 1] < '0' || frame[colon + 1] > '9') return "?";
  return frame.substr(0, frame.find_first_of(" \n", colon));
}

std::string without_folders(const std::string& place) { return place.substr(place.rfind('/') + 1); }

// As one word of a shell command. addr2line's own /proc/self would be another program's.
std::string quoted(const std::string& file) {
  if (file == "/proc/self/exe") return "/proc/" + std::to_string(getpid()) + "/exe";
  std::string word = "'";
  for (const char c : file) word += c == '\'' ? "'\\''" : std::string(1, c);
  return word + "'";
}

// Asks for many addresses at once. addr2line answers each with a line 0x…, then the innermost of the frames inlined
// there, then those around it: the first one that is not of the executor's headers is the kernel's.
void look_up(const std::vector<const void*>& codes) {
  if (codes.empty()) return;
  std::string command = "addr2line -a -i -e " + quoted(program_file());
  for (const void* code : codes) {
    known[code] = "?";
    char address[32];
    // A return address is that of the instruction after the call.
    std::snprintf(address, sizeof address, " 0x%zx", size_t(code) - load_address() - 1);
    command += address;
  }
  std::FILE* answer = popen((command + " 2>/dev/null").c_str(), "r");
  if (!answer) return;
  char buffer[4096];
  size_t next = 0;
  while (std::fgets(buffer, sizeof buffer, answer)) {
    const std::string frame = buffer;
    if (frame.starts_with("0x")) {
      ++next;
    } else if (next > 0 && next <= codes.size() && known[codes[next - 1]] == "?" &&
               frame.find("/steps/simt/") == std::string::npos) {
      known[codes[next - 1]] = place_of(frame);
    }
  }
  pclose(answer);
}

}  // namespace

std::string source_line(const void* code) {
  if (!code) return "?";
  std::lock_guard lock(mutex);
  if (!known.contains(code)) look_up({code});
  return without_folders(known[code]);
}

std::vector<LineTraffic> traffic_by_line(const Counters& counters) {
  std::lock_guard lock(mutex);
  std::vector<const void*> unknown;
  for (const SiteTraffic& site : counters.sites)
    if (!known.contains(site.code)) unknown.push_back(site.code);
  constexpr size_t kAtOnce = 500;  // a command line has its limits
  for (size_t i = 0; i < unknown.size(); i += kAtOnce)
    look_up({unknown.begin() + i, unknown.begin() + std::min(i + kAtOnce, unknown.size())});
  std::map<std::tuple<std::string, int, bool, bool>, Traffic> lines;
  for (const SiteTraffic& site : counters.sites) {
    const std::string& line = known[site.code];
    const size_t colon = line.rfind(':');
    const std::string file = line.substr(0, colon);
    const int number = colon == std::string::npos ? 0 : std::stoi(line.substr(colon + 1));
    lines[{file, number, site.shared, site.write}] += site.traffic;
  }
  std::vector<LineTraffic> result;
  for (const auto& [key, traffic] : lines) {
    const auto& [file, number, shared, write] = key;
    const std::string place = number ? file + ":" + std::to_string(number) : file;
    result.push_back({without_folders(place), number ? file : "", number, shared, write, traffic});
  }
  return result;
}

}  // namespace simt
