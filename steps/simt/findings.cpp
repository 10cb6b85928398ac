// Collects notes of what went wrong, and puts them into words: one line each, kernel and place first.
#include "simt/findings.h"

#include <atomic>
#include <mutex>

#include "harness/error.h"
#include "simt/symbols.h"

namespace simt {
namespace {

constexpr size_t kMostNotes = 20;
constexpr size_t kShownInMessage = 5;

std::mutex mutex;  // guards notes
std::vector<Note> notes;
std::atomic<bool> stop = false;
const void* kernel = nullptr;
std::vector<Finding> last_findings;

// Whether two notes are of the same mistake, seen in another thread or block.
bool alike(const Note& a, const Note& b) {
  if (a.kind != b.kind || a.code != b.code || a.text.size() != b.text.size()) return false;
  for (size_t i = 0; i < a.text.size(); ++i)
    if (a.text[i].code != b.text[i].code) return false;
  return a.code != nullptr || a.text.size() > 1;
}

// A read that came before the write it should have come after is found twice: as a read of unwritten memory, and, when
// the write comes, as a race. The race says it all.
bool is_explained_by_race(const Note& note) {
  if (note.kind != Kind::uninitialised) return false;
  for (const Note& race : notes) {
    if (race.kind != Kind::race) continue;
    if (race.code == note.code || race.text[0].code == note.code) return true;
  }
  return false;
}

Finding put_into_words(const Note& note) {
  std::string text = kernel_name(kernel);
  if (note.code) text += " at " + source_line(note.code);
  text += ", " + note.who + ": " + name_of(note.kind) + ": ";
  for (const Piece& piece : note.text) {
    text += piece.text;
    if (piece.code) text += source_line(piece.code);
  }
  return {note.kind, text};
}

}  // namespace

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::deadlock:
      return "deadlock";
    case Kind::early_exit:
      return "early exit";
    case Kind::divergence:
      return "divergence";
    case Kind::mask:
      return "wrong mask";
    case Kind::absent_lane:
      return "absent lane";
    case Kind::race:
      return "race";
    case Kind::out_of_bounds:
      return "out of bounds";
    case Kind::misaligned:
      return "misaligned";
    case Kind::uninitialised:
      return "uninitialised";
    case Kind::missing_fence:
      return "missing fence";
    case Kind::unfinished_copy:
      return "unfinished copy";
    case Kind::barrier_misuse:
      return "wrong use of a barrier";
    case Kind::bad_index:
      return "index out of range";
    case Kind::exception:
      return "exception";
    case Kind::limit:
      return "limit of the observer";
  }
  return "?";
}

void begin_findings(const void* of_kernel) {
  notes.clear();
  last_findings.clear();
  stop = false;
  kernel = of_kernel;
}

void add_note(Note note) {
  std::lock_guard lock(mutex);
  for (const Note& old : notes)
    if (alike(old, note)) return;
  if (notes.size() < kMostNotes) notes.push_back(std::move(note));
  if (notes.size() == kMostNotes) stop = true;
}

bool enough_found() { return stop.load(std::memory_order_relaxed); }
void stop_grid() { stop = true; }

const std::vector<Finding>& findings() { return last_findings; }

void report_findings() {
  if (notes.empty()) return;
  std::vector<Note> unexplained;
  for (const Note& note : notes)
    if (!is_explained_by_race(note)) unexplained.push_back(note);
  std::string message;
  for (const Note& note : unexplained) {
    last_findings.push_back(put_into_words(note));
    if (last_findings.size() <= kShownInMessage) message += (message.empty() ? "" : "\n") + last_findings.back().text;
  }
  if (unexplained.size() > kShownInMessage)
    message += "\n… and " + std::to_string(notes.size() - kShownInMessage) +
               (notes.size() < kMostNotes ? "" : " or more") + " other findings";
  throw flash::KernelFault(message);
}

}  // namespace simt
