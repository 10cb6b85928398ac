#!/usr/bin/env python3
"""docs/ideas.py: every idea of docs/ideas.md can be taken out, what is left compiles (for the CPU device; `exercises` runs
it), and mistakes are refused.

    ideas_test.py [C++ compiler]
"""
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import ideas  # noqa: E402

COMPILER = "c++"


def run(*arguments):
    return subprocess.run([sys.executable, ROOT / "docs/ideas.py", *map(str, arguments)], capture_output=True, text=True)


class Ideas(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.folder = Path(place.name) / "20_mine"

    def test_each_can_be_taken_out(self):
        known = ideas.ideas()
        self.assertGreater(len(known), 5)
        for idea, (step, changes) in known.items():
            with self.subTest(idea):
                folder = self.folder.with_name(f"20_{idea}")
                self.assertEqual(run(idea, folder).returncode, 0)
                changed = {path.name for path in folder.iterdir()
                           if path.read_text() != (ROOT / "steps" / step.split("/")[0] / path.name).read_text()}
                self.assertEqual(changed, {f"{step.split('/')[1]}.cu"} | {Path(change["file"]).name for change in changes})
                kernel = folder / f"{step.split('/')[1]}.cu"
                compiled = subprocess.run([COMPILER, "-x", "c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi", f"-I{ROOT / 'steps'}", kernel],
                                          capture_output=True, text=True)
                self.assertEqual((compiled.returncode, compiled.stderr[:2000]), (0, ""))

    def test_each_is_described_under_its_name(self):
        page = ideas.PAGE.read_text(encoding="utf-8")
        self.assertEqual(re.findall(r"^### (\w+)$", page, re.MULTILINE), list(ideas.ideas()))
        self.assertEqual(len(re.findall(r"^<!-- without ", page, re.MULTILINE)), sum(len(changes) for _, changes in ideas.ideas().values()))

    def test_mistakes_are_refused_in_a_line(self):
        first = next(iter(ideas.ideas()))
        self.folder.mkdir()
        for arguments, said in ((("nonsense", self.folder), "there is no idea 'nonsense'; there are " + first),
                                ((first,), "two digits and a name"), ((first, self.folder.with_name("mine")), "two digits and a name"),
                                ((first, self.folder), "already"), ((first, "--all"), "either")):
            with self.subTest(said):
                refused = run(*arguments)
                self.assertEqual((refused.returncode, refused.stdout, refused.stderr.count("\n")), (2, "", 1))
                self.assertIn(said, refused.stderr)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_region_that_is_gone_is_named(self):
        page = self.folder.with_name("ideas.md")
        page.write_text("<!-- without it of 08_hopper_async/backward, steps/08_hopper_async/backward.cu: no such line -->\n```cuda\n```\n")
        for path, said in (("steps/08_hopper_async/backward.cu", "'no such line' is in no line"), ("steps/nope.h", "No such file")):
            page.write_text(page.read_text().replace("steps/08_hopper_async/backward.cu:", f"{path}:"))
            with mock.patch.object(ideas, "PAGE", page), self.assertRaisesRegex(ideas.Fault, f"it: {path}: .*{said}"):
                ideas.files("it")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        COMPILER = sys.argv.pop(1)
    unittest.main()
