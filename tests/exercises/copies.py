#!/usr/bin/env python3
"""Makes a copy of every exercise's kernel, NN.N_hole/…, of every answer that is not the chapter's own, NN.N_answer/…, and
of every kernel without an idea, 30_without_…/…

    copies.py OUTPUT_FOLDER [--list]       --list: prints only the names of the kernel files
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "docs"))
import exercise  # noqa: E402
import ideas  # noqa: E402

output = Path(sys.argv[1])
kernels = []


def add(folder, texts):
    kernels.extend(folder / Path(path).name for path in texts if path.endswith(".cu"))
    if "--list" not in sys.argv:
        exercise.write_copy(folder, texts)


for number, page in exercise.exercises().items():
    for kind in ("hole", "answer"):
        if kind == "answer" and not exercise.CODE.search(exercise.answer_page(page).read_text(encoding="utf-8")):
            continue
        add(output / f"{number}_{kind}", exercise.files(page, kind == "answer"))
for idea in ideas.ideas():
    add(output / f"30_without_{idea}", ideas.files(idea))
if "--list" in sys.argv:
    print(";".join(map(str, kernels)))
