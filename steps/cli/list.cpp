// `flashsteps list`: what there is.
#include <iostream>

#include "cli/commands.h"
#include "cli/options.h"

namespace flash::cli {
namespace {

// Where a step can run in this build.
std::vector<std::string> devices_of(const RegisteredStep& step) {
  std::vector<std::string> devices;
  if (step.builds.count(Target::host) || step.builds.count(Target::cpu)) devices.push_back("cpu");
  if (step.builds.count(Target::gpu)) devices.push_back("gpu");
  return devices;
}

Row row_of(const RegisteredStep& step, Format format) {
  const Step& s = step.info();
  std::vector<std::string> dtypes, passes;
  for (DType t : s.dtypes) dtypes.push_back(flash::name_of(t));
  for (Pass pass : {Pass::forward, Pass::backward})
    if (step.has(pass)) passes.push_back(name_of(pass));
  Row row = {{"id", step.id}, {"idea", s.idea}, {"dtypes", dtypes}};
  if (format == Format::json)
    row["head_dims"] = s.head_dims;
  else
    row["head_dims"] = head_dims_text(s);
  row["passes"] = passes;
  row["causal"] = s.causal;
  row["dropout"] = s.dropout;
  row["kv_heads"] = s.kv_heads;
  row["min_sm"] = s.min_sm;
  row["devices"] = devices_of(step);
  if (format == Format::table && s.min_sm == 0) row["min_sm"] = nullptr;
  return row;
}

}  // namespace

Command add_list(CLI::App& command) {
  auto steps = std::make_shared<StepOption>();
  auto format = std::make_shared<FormatOption>();
  steps->add_to(command);
  format->add_to(command);
  return [steps, format] {
    std::vector<Row> rows;
    for (const RegisteredStep* step : select_steps(steps->prefixes)) rows.push_back(row_of(*step, format->format));
    print_rows(std::cout, format->format, rows,
               {"step", "idea", "dtypes", "head dims", "passes", "causal", "dropout", "kv heads", "min sm", "devices"});
    return 0;
  };
}

}  // namespace flash::cli
