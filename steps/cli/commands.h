// The subcommands of `flashsteps`: each adds itself to the command line and returns what to run when it is chosen. The
// value that comes back is the exit code: 0 all is well, 1 a check failed. Error (exit code 2) is thrown.
#pragma once
#include <CLI/CLI.hpp>
#include <functional>

namespace flash::cli {

using Command = std::function<int()>;

Command add_tour(CLI::App& command);
Command add_list(CLI::App& command);
Command add_check(CLI::App& command);
Command add_bench(CLI::App& command);
Command add_accuracy(CLI::App& command);
Command add_profile(CLI::App& command);
Command add_run(CLI::App& command);

}  // namespace flash::cli
