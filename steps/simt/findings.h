// What is wrong with a kernel, noted while it runs and put into words when the grid has ended.
#pragma once
#include <string>
#include <vector>

#include "simt/executor.h"

namespace simt {

// A text with places in the code in it. Looking up a line starts another program, so it waits until the grid has ended.
struct Piece {
  std::string text;
  const void* code = nullptr;  // shown as file:line after the text
};
using Text = std::vector<Piece>;

struct Note {
  Kind kind;
  const void* code;  // where; may be null
  std::string who;   // block and thread
  Text text;
};

// Starts a list of notes for a launch of this kernel.
void begin_findings(const void* kernel);

// Adds a note, unless there is one like it (same kind and places). Called by any worker.
void add_note(Note note);

// Whether so much is wrong that the rest of the grid need not run.
bool enough_found();
void stop_grid();

// Turns notes into findings(); throws flash::KernelFault if there are any.
void report_findings();

}  // namespace simt
