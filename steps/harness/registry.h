// The steps that are built in: each chapter's files register themselves, nothing here knows them.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "harness/step.h"

namespace flash {

// A step under its id, as compiled for each target.
struct RegisteredStep {
  std::string id;                 // "02_naive_gpu/forward"
  std::map<Target, Step> builds;  // never empty

  const Step& info() const { return builds.begin()->second; }  // the description is the same in every build
  std::string chapter() const { return id.substr(0, id.find('/')); }
  bool has(Pass pass) const { return pass == Pass::forward ? info().forward != nullptr : info().backward != nullptr; }
};

// All steps: by chapter, and in a chapter from rung to rung. Throws Error if one of them is not complete.
const std::vector<RegisteredStep>& all_steps();

// These steps; throws Error where a registration leaves out what no step can do without.
const std::vector<RegisteredStep>& complete(const std::vector<RegisteredStep>& steps);

// "1-256" or "32, 64, 128": what a step takes, for people.
std::string head_dims_text(const Step& step);

// The steps whose ids are meant by the prefixes, in that order: "05" takes a whole chapter, "07_warp/back", "08/ping"
// (a prefix of the chapter, a slash, a prefix of the kernel) one step. No prefixes: all. Throws Error if a prefix fits
// nothing, listing the ids.
std::vector<const RegisteredStep*> select_steps(const std::vector<std::string>& prefixes);

// The step of the same chapter whose forward pass saves what this one's backward pass reads; the step itself when it
// has both passes; null when the backward pass needs nothing but O and LSE.
const RegisteredStep* forward_of(const RegisteredStep& step);

// Why this step cannot solve this problem in this pass, as one line that says what it supports; nothing if it can.
std::optional<std::string> why_unsupported(const RegisteredStep& step, const Problem& problem, Pass pass);

}  // namespace flash
