#!/usr/bin/env python3
"""Makes a copy of every exercise's kernel, NN.N_hole/…, and of every answer that is not the chapter's own, NN.N_answer/…

    copies.py OUTPUT_FOLDER [--list]       --list: prints only the names of the kernel files
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "docs"))
import exercise  # noqa: E402

output = Path(sys.argv[1])
kernels = []
for number, page in exercise.exercises().items():
    for kind in ("hole", "answer"):
        if kind == "answer" and not exercise.CODE.search(exercise.answer_page(page).read_text(encoding="utf-8")):
            continue
        folder = output / f"{number}_{kind}"
        kernels += [folder / Path(path).name for path in exercise.files(page) if path.endswith(".cu")]
        if "--list" not in sys.argv:
            exercise.copy_to(folder, page, kind == "answer")
if "--list" in sys.argv:
    print(";".join(map(str, kernels)))
