"""big.sh itself, whose runs need a GPU: with a stand-in for the command, whatever that does must be told as it is; and
each of its commands, cut down, must be one that the CPU device can do.

    python3 tests/long/big_test.py build/flashsteps"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
FLASHSTEPS = sys.argv.pop()
# What it does depends on its arguments, which it writes down.
COMMAND = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  {cases}
esac
"""
TIMEOUT = """#!/bin/sh
[ "$1" -ge 60 ] || exit 99
shift
exec {timeout} 1 "$@"
"""


class Big(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.write("timeout", TIMEOUT.format(timeout=shutil.which("timeout")))

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, 0o755)
        return path

    # Runs big.sh; returns what came of it and the commands that it gave.
    def run_big(self, cases, *words):
        log = os.path.join(self.folder, "log")
        open(log, "w").close()
        command = self.write("flashsteps", COMMAND.format(log=log, cases=cases))
        path = self.folder + os.pathsep + os.environ["PATH"]
        ran = subprocess.run(["bash", os.path.join(HERE, "big.sh"), command, *words], capture_output=True, text=True,
                             env={**os.environ, "PATH": path})
        with open(log) as file:
            return ran, file.read().splitlines()

    def test_all_well(self):
        ran, commands = self.run_big("*) echo fine;;")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertEqual(len(re.findall("^ok ", ran.stdout, re.M)), len(commands))
        self.assertRegex(ran.stdout, rf"\n0 of {len(commands)} failed, \d+ s\n$")
        self.assertGreater(len(commands), 10)
        for command in commands:
            self.assertRegex(command, r"^check .* --sample \d+.* --device gpu$")

    def test_what_fails_is_told(self):
        ran, commands = self.run_big("""*"--batch 65536"*) echo "FAILED  02_x/y forward"; exit 1;;
  *1048576*causal*) echo "flashsteps: no room" >&2; exit 2;;
  *"--seq 65536"*) exec sleep 20;;
  *4092*) kill -9 $$;;""")
        self.assertEqual(ran.returncode, 1, ran.stderr)
        failed = re.findall(r"^FAILED +\d+ s  exit code (\d+)  (check .*)$", ran.stdout, re.M)
        codes = {"--batch 65536": "1", "1048576.*causal": "2", "--seq 65536": "124", "4092": "137"}
        expected = [(code, command) for command in commands for pattern, code in codes.items()
                    if re.search(pattern, command)]
        self.assertEqual([(code, command + " --device gpu") for code, command in failed], expected)
        self.assertEqual(len(re.findall("^ok ", ran.stdout, re.M)), len(commands) - len(failed))
        self.assertRegex(ran.stdout, rf"\n{len(failed)} of {len(commands)} failed, \d+ s\n$")
        self.assertIn("FAILED  02_x/y forward", ran.stdout)
        self.assertIn("flashsteps: no room", ran.stdout)

    def test_some_of_them(self):
        all_commands = self.run_big("*) ;;")[1]
        ran, commands = self.run_big("*) ;;", "17477")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertEqual(commands, [command for command in all_commands if "17477" in command])
        groups = [self.run_big("*) ;;", group)[1] for group in ("grid", "lengths", "queries", "keys")]
        self.assertEqual([command for group in groups for command in group], all_commands)
        self.assertTrue(all(groups))
        ran, commands = self.run_big("*) ;;", "--nothing-like-it")
        self.assertEqual((ran.returncode, commands), (2, []))
        self.assertIn("no command has '--nothing-like-it'", ran.stderr)

    def test_no_command(self):
        self.assertNotEqual(subprocess.run(["bash", os.path.join(HERE, "big.sh")], capture_output=True).returncode, 0)
        ran = subprocess.run(["bash", os.path.join(HERE, "big.sh"), "/no/flashsteps", "--seq 65536"], capture_output=True,
                             text=True)
        self.assertEqual(ran.returncode, 1)
        self.assertIn("exit code 127", ran.stdout)

    def test_commands_are_possible(self):
        def smaller(match):
            option, value = match.groups()
            most = {"--batch": 1, "--heads": 2, "--kv-heads": 1, "--sample": 1000}.get(option, 33)
            return f"{option} {min(int(value), most)}"

        for command in self.run_big("*) ;;")[1]:
            small = re.sub(r"(--(?:batch|heads|kv-heads|seq|seq-k|sample)) (\d+)", smaller, command)
            small = small.replace("--device gpu", "--device cpu --no-observe")
            ran = subprocess.run([FLASHSTEPS, *small.split()], capture_output=True, text=True)
            self.assertEqual(ran.returncode, 0, small + "\n" + ran.stdout + ran.stderr)
            for step in re.findall(r" (\d\d\S*)", command.split("--")[0]):  # each that was named was checked
                self.assertRegex(ran.stdout, rf"(?m)^{step.replace('/', '[^/]*/')}\S* .* ok$")


if __name__ == "__main__":
    unittest.main()
