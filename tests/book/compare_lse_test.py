"""docs/results/compare_lse.py, which needs a GPU: with the CPU executor in its place, and a stand-in for flashsteps whose
"auto" device cuts off all that is below 2^-8 of an LSE.

    compare_lse_test.py build/flashsteps
"""
import csv
import math
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs/results"))
from compare_lse import normal_numbers  # noqa: E402

PROGRAM = sys.argv.pop(1)
STAND_IN = f"""#!{sys.executable}
import math, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / 'docs/results')!r})
from compare_lse import read_npy, write_npy
arguments = ["cpu" if a == "auto" else a for a in sys.argv[1:]]
code = subprocess.run([{PROGRAM!r}, *arguments]).returncode
if "auto" in sys.argv:
    lse = Path(arguments[arguments.index("--out") + 1]) / "lse.npy"
    scores = read_npy(lse)
    units = [2.0 ** (math.frexp(x)[1] - 8) for x in scores]
    write_npy(lse, (len(scores),), [math.trunc(x / unit) * unit for x, unit in zip(scores, units)])
sys.exit(code)
"""


class CompareLseTest(unittest.TestCase):
    def compare(self, program, devices):
        with tempfile.TemporaryDirectory() as folder:
            stand_in, out = Path(folder) / "flashsteps", Path(folder) / "out.csv"
            stand_in.write_text(program, encoding="utf-8")
            stand_in.chmod(0o755)
            ran = subprocess.run([sys.executable, str(ROOT / "docs/results/compare_lse.py"), str(out), "--flashsteps", str(stand_in), "--devices", *devices],
                                 capture_output=True, text=True)
            lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
            return ran, [{name: float(x) for name, x in row.items()} for row in csv.DictReader(lines[1:])]

    def test_the_same_scores(self):
        ran, rows = self.compare(STAND_IN, ["cpu", "cpu"])
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertEqual([row["head_dim"] for row in rows], [64, 128, 256])
        for row in rows:
            self.assertEqual((row["difference_rms"], row["largest_difference"], row["mean_nearer_to_0"]), (0, 0, 0))
            expected = 5 * row["head_dim"] ** 0.5  # of five times the product of two normal vectors
            self.assertAlmostEqual(row["score_rms"] / expected, 1, delta=0.2)
            # e4m3 keeps 4 bits: a product is off by 2^-4 / sqrt(12) * sqrt(2) / 1.4 or so.
            self.assertAlmostEqual(row["rounding_rms"] / row["score_rms"], 0.037, delta=0.01)

    def test_scores_cut_off(self):
        ran, rows = self.compare(STAND_IN, ["auto", "cpu"])
        self.assertEqual(ran.returncode, 0, ran.stderr)
        for row in rows:
            # Evenly spread between 0 and a unit, which is 2^-7 to 2^-8 of the score; scores are normal.
            self.assertAlmostEqual(row["difference_rms"] / row["score_rms"], 2**-7.5 / 3**0.5, delta=0.0008)
            self.assertAlmostEqual(row["mean_nearer_to_0"] / row["difference_rms"], 3**0.5 / 2 * (2 / math.pi) ** 0.5, delta=0.05)
            self.assertLess(row["largest_difference"], row["largest_score"] * 2**-7)
            self.assertGreater(row["largest_difference"], row["largest_score"] * 2**-9)

    def test_numbers_have_eight_bits_the_small_ones_too(self):
        for x in normal_numbers(1000):
            mantissa = math.frexp(x)[0] * 256
            self.assertEqual(mantissa, int(mantissa))
        odd = [x for x in normal_numbers(1000) if math.frexp(x)[0] * 256 % 2]
        self.assertTrue(400 < len(odd) < 600, len(odd))
        self.assertTrue(any(abs(x) < 0.05 for x in odd))

    def test_a_run_that_fails(self):
        ran, rows = self.compare("#!/bin/sh\necho no such step >&2; exit 2\n", ["auto", "cpu"])
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("no such step", ran.stderr)
        self.assertEqual(rows, [])


if __name__ == "__main__":
    unittest.main()
