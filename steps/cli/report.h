// What `flashsteps check` says about the comparisons it made.
#pragma once
#include <iosfwd>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cli/rows.h"
#include "cli/verify.h"

namespace flash::cli {

// One comparison to make.
struct Item {
  const RegisteredStep* step;
  Pass pass;
  Target target;
  Problem problem;
  Values values = Values::normal;
};

// How they are run, as far as the command that repeats one must say it.
struct HowRun {
  int sample = 0;
  bool cpu = false;
};

// The command that repeats one comparison.
std::string repeat_command(const Item& item, const HowRun& options);

class Report {
 public:
  // `all_rows`: rows for programs are wanted, not the table.
  Report(Format format, HowRun options) : format_(format), options_(options) {}

  // Counts a comparison. If it failed, `smallest` is what it can be cut down to and still fails.
  void add(const Item& item, const Outcome& outcome);
  void add_smallest(const Item& item, const Outcome& outcome);

  // The device cannot be used any more, and so many comparisons were not made.
  void stop_after_loss(size_t not_made);

  // Prints everything; true if all passed.
  bool print(std::ostream& out, const std::string& first_line) const;

 private:
  // A step's line in the table: how many problems, and the closest call among them.
  struct Tally {
    int problems = 0, failed = 0;
    double error = 0, allowed = 0;
    std::string worst = "-";
    double ratio = -1;

    void add(const Outcome& outcome);
  };

  void add_failure(const std::string& title, const Item& item, const Outcome& outcome);

  Format format_;
  HowRun options_;
  std::map<std::tuple<std::string, std::string, std::string>, Tally> tallies_;  // by step, pass, dtype
  std::vector<Row> rows_;
  std::vector<std::string> failures_;
};

}  // namespace flash::cli
