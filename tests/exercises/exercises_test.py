#!/usr/bin/env python3
"""Every exercise's hole compiles, and `check` fails it cleanly; every answer passes, and every kernel without an idea. And how a
folder is made.

    exercises_test.py flashsteps_exercises
"""
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import exercise  # noqa: E402
import ideas  # noqa: E402

PROGRAM = sys.argv.pop(1)


def check(step, *shape):
    """Exit code of `check`, and its rows."""
    done = subprocess.run([PROGRAM, "check", step, "--device", "cpu", "--head-dim", "64", "--format", "json", *shape],
                          capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


class ExercisesTest(unittest.TestCase):
    def test_holes_fail(self):
        for number in exercise.exercises():
            with self.subTest(number):
                code, rows = check(f"{number}_hole", "--seq", "300", "--causal")
                self.assertEqual(code, 1, rows)
                self.assertTrue(any(not row["ok"] and row["reason"] for row in rows), rows)

    def test_answers_pass(self):
        steps = json.loads(subprocess.run([PROGRAM, "list", "--format", "json"], capture_output=True, text=True, check=True).stdout)
        answers = [step["id"] for step in steps if "_answer/" in step["id"]]
        self.assertGreaterEqual(len(answers), 3)
        for step in answers:
            for shape in (["--seq", "100", "--seq-k", "170", "--scale", "-2"], ["--seq", "75", "--seq-k", "70", "--causal"],
                          ["--seq", "5", "--seq-k", "2", "--causal"], ["--seq", "3", "--seq-k", "0"]):
                with self.subTest(step, shape=shape):
                    code, rows = check(step, *shape)
                    self.assertEqual(code, 0, rows)

    def test_kernels_without_an_idea_pass(self):
        steps = json.loads(subprocess.run([PROGRAM, "list", "--format", "json"], capture_output=True, text=True, check=True).stdout)
        without = [step for step in steps if "_without_" in step["id"]]
        self.assertEqual(len(without), len(ideas.ideas()))
        for step in without:
            modes = [[], ["--deterministic"]] if step["passes"] == ["backward"] else [[]]
            for shape in (["--seq", "300", "--seq-k", "400"], ["--seq", "300", "--heads", "4", "--kv-heads", "2", "--causal"]):
                for mode in modes:
                    with self.subTest(step["id"], shape=shape, mode=mode):
                        code, rows = check(step["id"], *shape, *mode)
                        self.assertEqual(code, 0, rows)

    def test_every_chapter_has_one_and_every_exercise_an_answer(self):
        numbers = exercise.exercises()
        chapters = {path.name[:2] for path in ROOT.glob("steps/0[2-8]_*")}
        self.assertEqual({number[:2] for number in numbers}, chapters)
        for page in numbers.values():
            self.assertTrue(exercise.answer_page(page).is_file(), page.name)

    def test_every_page_takes_the_folder_of_another_away(self):
        for number, page in exercise.exercises().items():
            self.assertIn(f"\nrm -rf steps/20_mine && python3 docs/exercise.py {number} steps/20_mine\n", page.read_text(encoding="utf-8"))

    def test_folder(self):
        def make(*arguments):
            return subprocess.run([sys.executable, str(ROOT / "docs/exercise.py"), *arguments], capture_output=True, text=True)

        with tempfile.TemporaryDirectory() as folder:
            mine = Path(folder) / "20_mine"
            self.assertEqual(make("05.1", str(mine)).returncode, 0)
            names = {path.name for path in mine.iterdir()}
            self.assertEqual(names, {"forward.cu", "tiles.h", "closed_forms.cpp"})
            self.assertIn("Exercise 05.1", (mine / "forward.cu").read_text(encoding="utf-8"))
            for wrong in (["05.1", str(mine)], ["05.9", f"{folder}/21_mine"], ["05.1", f"{folder}/mine"], ["05.1"]):
                self.assertEqual(make(*wrong).returncode, 2, wrong)

    def test_copies_made_again_are_of_the_chapter_as_it_is(self):
        page = exercise.exercises()["05.1"]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "tiles.h").write_text("// of the day before\n", encoding="utf-8")
            exercise.write_copy(Path(folder), exercise.files(page))
            before = {path: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
            exercise.write_copy(Path(folder), exercise.files(page))  # nothing new: nothing for a build to do
            self.assertEqual(before, {path: path.stat().st_mtime_ns for path in Path(folder).iterdir()})
            self.assertEqual((Path(folder) / "tiles.h").read_bytes(), (ROOT / "steps/05_kernel_fusion/tiles.h").read_bytes())


if __name__ == "__main__":
    unittest.main()
