#!/usr/bin/env python3
"""The exercises to be coded: puts one into a folder of your own, with a hole where your code belongs.

    python3 docs/exercise.py                                 lists them
    python3 docs/exercise.py 05.1 steps/20_mine              makes the folder
    python3 docs/exercise.py 05.1 steps/20_mine --answer     the same with a worked answer in the place of the hole

The folder has the chapter's file, with the hole, its headers and its closed forms. The build finds it, and `check`,
`bench` and `profile` know it: its step is 20_mine/…

An exercise is a page of docs/exercises. Which region of which file (as in docs/book.py) becomes what, it says by

    <!-- hole steps/05_kernel_fusion/forward.cu: // Online softmax: -->

and the code block that follows. The page of the same name in docs/answers says <!-- answer … --> in the same way; where
it does not, the answer is the chapter's own code.
"""
import argparse
import re
import sys
import textwrap
from pathlib import Path

from book import ROOT, Fault, region_lines

CODE = re.compile(r"^<!-- (hole|answer) (?P<file>\S+?): (?P<region>.+?) -->\n```(?:cuda|cpp)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def exercises():
    """Number → page, in order."""
    return {path.name.split("_")[0]: path for path in sorted((ROOT / "docs/exercises").glob("[0-9][0-9].[0-9]_*.md"))}


def title(page):
    return re.search(r"^# [\d.]+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)[1]


def answer_page(page):
    return ROOT / "docs/answers" / page.name


def replaced(text, region, code):
    """The text with the region's lines replaced, as far to the right as they were."""
    first, last = region_lines(text, region)
    lines = text.split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines[first : last + 1] if line.strip() and line[0] != "#")
    code = textwrap.indent(code.rstrip("\n"), " " * margin, lambda line: line.strip() and not line.startswith("#"))
    return "\n".join(lines[:first] + [code] + lines[last + 1 :])


def require_new(folder):
    """Refuses what cannot be a new folder of steps/."""
    if not folder or not re.fullmatch(r"\d\d_\w+", folder.name):
        raise Fault("say into which folder: two digits and a name, such as steps/20_mine")
    if folder.exists():
        raise Fault(f"there is a folder {folder} already; remove it, or choose another")


def write_copy(folder, texts):
    """Makes a folder of steps/: these files (path in the repository → text), and what their chapter has beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for path in texts:
        for pattern in ("*.h", "closed_forms.cpp"):
            for other in (ROOT / path).parent.glob(pattern):
                files[other.name] = other.read_text(encoding="utf-8")
    files |= {Path(path).name: text for path, text in texts.items()}
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # a build is to do no more than it must
            path.write_text(text, encoding="utf-8")


def change(texts, path, region, code):
    """Replaces a region of the file `path`, whose text is among `texts` or else still the repository's."""
    try:
        text = texts[path] if path in texts else (ROOT / path).read_text(encoding="utf-8")
        texts[path] = replaced(text, region, code)
    except (Fault, OSError) as fault:
        raise Fault(f"{path}: {fault}") from None


def files(page, answer=False):
    """Path of each file of the chapter that the exercise is about → its text with the holes, or with the answer."""
    texts = {}
    for hole in CODE.finditer(page.read_text(encoding="utf-8")):
        texts.setdefault(hole["file"], (ROOT / hole["file"]).read_text(encoding="utf-8"))
    for wanted in CODE.finditer((answer_page(page) if answer else page).read_text(encoding="utf-8")):
        try:
            change(texts, wanted["file"], wanted["region"], wanted["code"])
        except Fault as fault:
            raise Fault(f"{page.relative_to(ROOT)}: {fault}") from None
    return texts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exercise", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--answer", action="store_true")
    arguments = parser.parse_args()

    known = exercises()
    if not arguments.exercise:
        for number, page in known.items():
            print(f"{number}  {title(page):45}  {page.relative_to(ROOT)}")
        return 0
    try:
        if arguments.exercise not in known:
            raise Fault(f"there is no exercise {arguments.exercise}; there are {', '.join(known)}")
        require_new(arguments.folder)
        write_copy(arguments.folder, files(known[arguments.exercise], arguments.answer))
        for path in files(known[arguments.exercise]):
            print(f"{arguments.folder / Path(path).name}: " + ("the answer" if arguments.answer else f"look for 'Exercise {arguments.exercise}'"))
    except Fault as fault:
        print(f"exercise.py: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
