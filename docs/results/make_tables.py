#!/usr/bin/env python3
"""Fills the tables of the pages, and draws the plots of docs/figures, from the measured data beside this file.

    python3 docs/results/make_tables.py           writes every region and plot that has changed
    python3 docs/results/make_tables.py --check   writes nothing; a line for each that is stale, exit code 1 if there is one

A region of docs/*.md or README.md is what stands between two lines of its own,

    <!-- table NAME ARGUMENTS -->
    <!-- end table -->

and is replaced as a whole. The tables there are, with their arguments, are the functions marked @table in tables.py and, for
the page of the papers' claims, in claims.py:

    counters CHAPTER     h200_ncu_CHAPTER.csv: a row a kernel
    speed CHAPTER PASS   h200_bench_CHAPTER.csv: a row a length, every step of the chapter, and PyTorch at the same shape
    shapes CHAPTER PASS  h200_bench_CHAPTER.csv: a row a step and PyTorch kernel, for each head dim and mask; TFLOP/s by length
    determinism CHAPTER  h200_bench_CHAPTER.csv beside h200_bench_CHAPTER_deterministic.csv: TFLOP/s by length
    ideas [STEP]         h200_ideas.csv: what a kernel (this one) gains by each idea of docs/ideas.md
    quantising           h200_quantise_08_fp8.csv: µs by length
    accuracy             h200_accuracy_08_fp8.csv: the errors of flashsteps accuracy, and the paper's
    lse                  h200_lse_08_fp8.csv: LSE of 08/fp8 on the GPU beside the executor's, a column a head dim
    ratios STEP PASS     all h200_bench_*.csv: a step against PyTorch's kernels, geometric mean, least and most for each head dim
    ladder PASS [LAST [short]]   all h200_bench_*.csv: a row a step, N 1k, 2k, 4k; up to chapter LAST; sources in one line
    paper_traffic        h200_ncu_paper_shape.csv: HBM bytes and time of 02 against 05 + 06; a note on what is not there yet
    counters_compared    h200_counters.csv: where the executor's counters and the GPU's agree, and where not
    passes_02            no data but the copy and fp32 rates: what chapter 02's kernels must compute and move

In the CSV files lines that begin with # say when, where and by which command they were measured; they end as the note
below the table. A new chapter adds its files under these names, and a region to its page. The plots are the functions
marked @plot in plots.py; they take what the files have.
"""
import re
import sys
from pathlib import Path

import claims  # noqa: F401, it enters its tables
from measured import ROOT, TableError
from plots import PLOTS
from tables import TABLES

REGION = re.compile(r"^<!-- table (?P<call>[^\n]*?) -->\n(?P<text>.*?)^<!-- end table -->$", re.MULTILINE | re.DOTALL)


# ---- The pages


def pages():
    return sorted((ROOT / "docs").glob("*.md")) + [ROOT / "README.md"]


def filled(path, text):
    """The page's text with its tables made anew, and the (line, call) of each region that differs."""
    stale = []
    links = "docs/results/" if path.parent == ROOT else "results/"
    starts, ends = text.count("<!-- table "), text.count("<!-- end table -->")
    regions = list(REGION.finditer(text))
    if not len(regions) == starts == ends:
        raise TableError(f"{path.relative_to(ROOT)}: {starts} '<!-- table', {ends} '<!-- end table -->', {len(regions)} pairs; "
                         "each must be a line of its own")

    def make(match):
        line = text.count("\n", 0, match.start()) + 1
        words = match["call"].split()
        try:
            if not words or words[0] not in TABLES:
                raise TableError(f"there is no table '{match['call']}'; there are {', '.join(TABLES)}")
            try:
                new = TABLES[words[0]](links, *words[1:])
            except (TypeError, KeyError, ValueError) as error:
                raise TableError(f"table '{match['call']}': {type(error).__name__}: {error}") from error
        except TableError as error:
            raise TableError(f"{path.relative_to(ROOT)}:{line}: {error}") from error
        if new != match["text"]:
            stale.append((line, match["call"]))
        return f"<!-- table {match['call']} -->\n{new}<!-- end table -->"

    return REGION.sub(make, text), stale


def main(arguments):
    if arguments not in ([], ["--check"]):
        print("usage: make_tables.py [--check]", file=sys.stderr)
        return 2
    any_stale = False
    try:
        results = []
        for path in pages():
            text = path.read_text(encoding="utf-8")
            results.append((path, *filled(path, text)))
        drawings = {ROOT / "docs" / "figures" / name: draw() for name, draw in PLOTS.items()}
    except TableError as error:
        print(f"make_tables.py: {error}", file=sys.stderr)
        return 2
    for path, text, stale in results:
        for line, call in stale:
            any_stale = True
            print(f"{path.relative_to(ROOT)}:{line}: table '{call}' " + ("is stale" if arguments else "written"))
        if stale and not arguments:
            path.write_text(text, encoding="utf-8")
    for path, text in drawings.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            any_stale = True
            print(f"{path.relative_to(ROOT)}: " + ("is stale" if arguments else "drawn"))
            if not arguments:
                path.write_text(text, encoding="utf-8")
    return 1 if any_stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
