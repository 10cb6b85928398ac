"""run.py itself, with stand-ins for the command and for compute-sanitizer: what they say must come out as it is meant."""
import csv
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
COMMAND = """#!/bin/sh
echo '[{"id": "05_x/good", "min_sm": 75, "passes": ["forward"]}, {"id": "01_x/host", "min_sm": 0, "passes": ["forward"]},
       {"id": "06_x/bad", "min_sm": 75, "passes": ["backward"]}]'
"""
SANITIZER = """#!/bin/sh
case "$2 $7" in
  "memcheck 06_x/bad") echo "========= ERROR SUMMARY: 3 errors"; exit 99;;
  "racecheck 06_x/bad") echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"; exit 99;;
  "synccheck 06_x/bad") echo "FAILED 06_x/bad"; echo "========= ERROR SUMMARY: 0 errors"; exit 1;;
  "initcheck 06_x/bad") exec sleep 20;;
  racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
  "initcheck 05_x/good") echo "compute-sanitizer: device not supported"; exit 255;;
  *) echo "========= ERROR SUMMARY: 0 errors";;
esac
"""


class Run(unittest.TestCase):
    def test_results(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = {}
            for name, text in (("flashsteps", COMMAND), ("sanitizer", SANITIZER)):
                paths[name] = os.path.join(folder, name)
                with open(paths[name], "w") as file:
                    file.write(text)
                os.chmod(paths[name], 0o755)
            results = os.path.join(folder, "results.csv")
            arguments = [sys.executable, os.path.join(HERE, "run.py"), paths["flashsteps"], "--sanitizer",
                         paths["sanitizer"], "--csv", results, "--limit", "2", "--logs", os.path.join(folder, "logs")]
            ran = subprocess.run(arguments, capture_output=True, text=True)
            self.assertEqual(ran.returncode, 1, ran.stderr)
            with open(results) as file:
                rows = {(row["step"], row["tool"]): (row["result"], row["found"]) for row in csv.DictReader(file)}
            self.assertEqual(rows, {("05_x/good", "memcheck"): ("ok", "0"), ("05_x/good", "racecheck"): ("ok", "0"),
                                    ("05_x/good", "synccheck"): ("ok", "0"), ("05_x/good", "initcheck"): ("did not run", ""),
                                    ("06_x/bad", "memcheck"): ("found", "3"), ("06_x/bad", "racecheck"): ("found", "2"),
                                    ("06_x/bad", "synccheck"): ("check failed", "0"),
                                    ("06_x/bad", "initcheck"): ("time limit", "")})
            self.assertIn("8 runs, 5 not ok", ran.stdout)
            self.assertEqual(len(os.listdir(os.path.join(folder, "logs"))), 5)
            good = subprocess.run(arguments + ["--tools", "memcheck,racecheck", "--jobs", "1"], capture_output=True, text=True)
            self.assertIn("4 runs, 2 not ok", good.stdout)


if __name__ == "__main__":
    unittest.main()
