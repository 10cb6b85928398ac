// flashsteps: the course's one command. Exit codes: 0 success, 1 a check failed, 2 it could not be run as asked, 128 +
// a signal's number when it was asked to end: 130 after Ctrl-C.
#include <CLI/CLI.hpp>
#include <csignal>
#include <iostream>
#include <map>
#include <new>

#include "cli/commands.h"
#include "harness/error.h"
#include "harness/interrupt.h"

namespace {

// Ctrl-C, `kill` or a closed terminal once: the work ends at its next chance. Twice: at once.
void handle_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    if (sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = [](int number) {
      flash::interrupting_signal = number;
      flash::interrupt_requested = true;
      for (const int next : {SIGINT, SIGTERM, SIGHUP}) {  // whichever comes next
        struct sigaction now {};
        if (sigaction(next, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) std::signal(next, SIG_DFL);
      }
    };
    sigaction(signal, &action, nullptr);
  }
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow further is then an error of write(), like a full disk
}

// One line on stderr, whatever the message looked like.
int refuse(const std::string& message) {
  std::cerr << "flashsteps: " << flash::one_line(message) << "\n";
  return 2;
}

int run(int argc, char** argv) {
  using namespace flash::cli;
  CLI::App app{"FlashAttention, step by step: runs, checks and times the chapters' kernels."};
  app.name("flashsteps");
  app.require_subcommand(0, 1);
  std::map<CLI::App*, Command> commands;
  const auto add = [&](const char* name, const char* help, Command (*add_options)(CLI::App&)) {
    CLI::App* command = app.add_subcommand(name, help);
    commands[command] = add_options(*command);
    return command;
  };
  CLI::App* tour = add("tour", "The chapters in order: error, memory, traffic, and on a GPU speed", add_tour);
  add("list", "The steps there are, and what each supports", add_list);
  add("check", "Compare steps with the CPU reference", add_check);
  add("bench", "Time steps on the GPU", add_bench);
  add("accuracy", "What eight bits cost: errors beside those of sixteen, with outliers among the inputs", add_accuracy);
  add("profile", "What each kernel moves, counted on any machine, by kernel or by line", add_profile);
  add("run", "Put your own tensors through a step", add_run);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help
    return refuse(std::string(e.what()) + " (flashsteps --help and flashsteps COMMAND --help say what there is)");
  }
  for (const auto& [command, act] : commands)
    if (command->parsed()) return act();
  return commands.at(tour)();
}

}  // namespace

int main(int argc, char** argv) {
  handle_signals();
  int code = 2;
  try {
    code = run(argc, argv);
  } catch (const flash::Error& e) {
    return refuse(e.what());
  } catch (const flash::KernelFault& e) {
    std::cerr << "flashsteps: " << e.what() << "\n";
    return 1;
  } catch (const flash::Interrupted&) {
    const int signal = flash::interrupting_signal;
    const std::string by = signal == SIGTERM ? " by SIGTERM" : signal == SIGHUP ? " by SIGHUP" : "";
    refuse("interrupted" + by + "; nothing was written");
    return 128 + signal;
  } catch (const std::bad_alloc&) {
    return refuse("out of memory; choose a smaller problem");
  } catch (const std::exception& e) {
    return refuse(e.what());
  }
  std::cout.flush();
  if (!std::cout) return refuse("standard output cannot be written to; is the disk full?");
  return code;
}
