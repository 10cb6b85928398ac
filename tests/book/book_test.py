#!/usr/bin/env python3
"""Each kind of fault that docs/book.py is there to find, planted in a small book, is found, and nothing else is."""
import contextlib
import importlib.util
import io
import os
import sys
import tempfile
import unittest
from pathlib import Path

path = Path(__file__).resolve().parent.parent.parent / "docs" / "book.py"
spec = importlib.util.spec_from_file_location("book", path)
book = importlib.util.module_from_spec(spec)
spec.loader.exec_module(book)

KERNEL = """// 05 fusion.
constexpr int Br = 32;  // rows

__global__ void fused(float* O) {
  // Scores.
  float s = 0.0f;
  for (int d = 0; d < 64; d++) {
    s += d;

#pragma unroll
    s *= 2;
  }

  O[0] = s;
}

const Registration step = register_step(__FILE__, {.rung = 1, .forward = forward});
"""
PAGE = """# 05 Fusion

## The idea
See [the code](../steps/05_fusion/forward.cu), [below](#reading-the-code), `steps/05_fusion/forward.cu` and `05/for`.

## Reading the code
1. The scores:
   <!-- excerpt steps/05_fusion/forward.cu: // Scores. -->
   ```cuda
   // Scores.
   float s = 0.0f;
   for (int d = 0; d < 64; d++) {
     s += d;

   #pragma unroll
     s *= 2;
   }
   ```
2. The end. <!-- not a directive -->
   <!-- see steps/05_fusion/forward.cu: O[0] = s; -->

```
build/flashsteps check 05 --causal --seq 100   # a comment
build/flashsteps list --format json && cp -r steps/05_fusion steps/20_mine
```
`build/flashsteps check 20_mine/forward` passes, and so does `--causal`.
"""
PROGRAM = """#!/bin/sh
case "$1" in
  check) printf 'Compare\\n\\nOptions:\\n  -h,--help          Help\\n  --seq INT          Length\\n  --causal           Mask\\n' ;;
  list) printf 'Steps\\n\\nOptions:\\n  -h,--help          Help\\n  --format           How to print (csv, json)\\n' ;;
  *) printf 'Usage\\n\\nOptions:\\n  -h,--help   Help\\n\\nSubcommands:\\n  check      Compare\\n  list       Steps\\n' ;;
esac
"""


class BookTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "steps/05_fusion").mkdir(parents=True)
        (self.root / "docs").mkdir()
        self.kernel, self.page = self.root / "steps/05_fusion/forward.cu", self.root / "docs/05_fusion.md"
        self.kernel.write_text(KERNEL, encoding="utf-8")
        self.page.write_text(PAGE, encoding="utf-8")
        (self.root / "README.md").write_text("[05](docs/05_fusion.md#the-idea)\n", encoding="utf-8")
        self.program = self.root / "flashsteps"
        self.program.write_text(PROGRAM)
        os.chmod(self.program, 0o755)

    def faults(self):
        made = book.Book(self.root)
        made.check(str(self.program))
        return made.faults

    def plant(self, right, wrong, *expected):
        """With `wrong` in the place of `right` in the page, there is one fault, and it says this."""
        self.assertEqual(PAGE.count(right), 1)
        self.page.write_text(PAGE.replace(right, wrong), encoding="utf-8")
        faults = self.faults()
        self.assertEqual(len(faults), 1, faults)
        for text in expected:
            self.assertIn(text, faults[0])

    def test_true_book(self):
        self.assertEqual(self.faults(), [])

    def test_excerpt_that_is_not_the_code(self):
        self.plant("   float s = 0.0f;", "   float s = 1.0f;", "05_fusion.md:11", "not what its file says")

    def test_code_that_has_changed(self):
        self.kernel.write_text(KERNEL.replace("s += d;", "s += 2 * d;"), encoding="utf-8")
        self.assertIn("not what its file says", self.faults()[0])
        filled = book.Book(self.root).filled(book.Page(self.page))
        self.assertEqual(filled, PAGE.replace("s += d;", "s += 2 * d;"))

    def test_excerpt_is_filled_in_where_there_is_none(self):
        block = PAGE[PAGE.index("   ```cuda") : PAGE.index("2. The end")]
        self.page.write_text(PAGE.replace(block, ""), encoding="utf-8")
        self.assertEqual(book.Book(self.root).filled(book.Page(self.page)), PAGE)

    def test_region_that_is_not_there(self):
        self.plant("O[0] = s; -->", "O[1] = s; -->", "05_fusion.md:20", "'O[1] = s;' is in no line")

    def test_region_that_is_not_unique(self):
        self.plant("O[0] = s; -->", "s -->", "is in lines")

    def test_region_of_a_file_that_is_not_there(self):
        self.plant("see steps/05_fusion/forward.cu", "see steps/05_fusion/backward.cu", "there is no file steps/05_fusion/backward.cu")

    def test_code_that_nobody_checks(self):
        self.plant("2. The end.", "```cuda\nO[0] = 0;\n```\n2. The end.", "code without a line")

    def test_kernel_that_is_not_shown(self):
        (self.root / "steps/05_fusion/fast.cu").write_text(KERNEL, encoding="utf-8")
        self.assertEqual(len(self.faults()), 1)
        self.assertIn("nothing of steps/05_fusion/fast.cu is shown", self.faults()[0])

    def test_dead_link(self):
        self.plant("(../steps/05_fusion/forward.cu)", "(../steps/05_fusion/forwards.cu)", "05_fusion.md:4", "no such file")

    def test_dead_anchor(self):
        self.plant("(#reading-the-code)", "(#reading-code)", "no heading there has this anchor")

    def test_dead_anchor_of_another_page(self):
        (self.root / "README.md").write_text("[05](docs/05_fusion.md#idea)\n", encoding="utf-8")
        self.assertEqual(len(self.faults()), 1)

    def test_html(self):
        self.plant("1. The scores", "1. The vector<float> of scores", "HTML")

    def test_unknown_step(self):
        self.plant("`05/for`", "`05/back`", "there is no step 05/back")
        self.plant("check 05 ", "check 06 ", "05_fusion.md:23", "there is no step 06")
        self.plant("20_mine/forward`", "20_mine/backward`", "there is no step 05_fusion/backward")

    def test_unknown_file(self):
        self.plant("`steps/05_fusion/forward.cu`", "`steps/05_fusion/forwards.cu`", "there is no file")
        self.plant("--causal --seq 100   # a comment", "\nsed -i s/32/64/ steps/06_fusion/forward.cu", "there is no file steps/06_fusion")

    def test_unknown_name(self):
        self.plant("1. The scores", "1. The scores: `register_step<Br>(x)`, `fused_scores(O)`", "fused_scores occurs nowhere")

    def test_unknown_subcommand(self):
        self.plant("build/flashsteps list", "build/flashsteps lists", "no subcommand lists")

    def test_unknown_option(self):
        self.plant("05 --causal", "05 --casual", "05_fusion.md:23", "flashsteps check has no option --casual")
        self.plant("`--causal`", "`--casual`", "has an option --casual")

    def test_option_without_its_value(self):
        self.plant("--seq 100 ", "--seq ", "--seq wants a value")

    def test_value_that_is_no_choice(self):
        self.plant("--format json", "--format jason", "no jason among csv, json")

    def test_exit_code(self):
        def run():
            with contextlib.redirect_stderr(io.StringIO()):
                sys.argv = ["book.py", "--check", "--flashsteps", str(self.program), "--root", str(self.root)]
                return book.main()
        self.assertEqual(run(), 0)
        self.page.write_text(PAGE.replace("float s = 0", "float s = 1"), encoding="utf-8")
        self.assertEqual(run(), 1)


class RegionTest(unittest.TestCase):
    def lines(self, region):
        first, last = book.region_lines(KERNEL, region)
        return first + 1, last + 1

    def test_regions(self):
        self.assertEqual(self.lines("constexpr int Br"), (2, 2))             # a paragraph
        self.assertEqual(self.lines("__global__ void fused"), (4, 15))       # a function, blank lines and all
        self.assertEqual(self.lines("// Scores."), (5, 12))                  # a paragraph that ends with a loop
        self.assertEqual(self.lines("O[0] = s;"), (14, 14))                  # up to a brace that others opened
        self.assertEqual(self.lines("// Scores. … float s"), (5, 6))         # up to a text
        self.assertEqual(self.lines("// Scores. … s *= 2"), (5, 12))         # and what closes the loop

    def test_text_that_does_not_follow(self):
        with self.assertRaises(book.Fault):
            book.region_lines(KERNEL, "O[0] = s; … // Scores.")


if __name__ == "__main__":
    unittest.main()
