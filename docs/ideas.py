#!/usr/bin/env python3
"""Takes an idea out of a kernel: makes a folder of steps/ with the kernel as it would be without it.

    python3 docs/ideas.py                        lists the ideas
    python3 docs/ideas.py rotation steps/20_mine makes the folder; its step is 20_mine/backward
    python3 docs/ideas.py --all                  steps/30_without_NAME for each of them

docs/ideas.md has, for each idea, the regions (as in docs/book.py) that change, and the code in their place:

    <!-- without NAME of STEP, FILE: REGION -->
"""
import argparse
import re
import shutil
import sys
from pathlib import Path

from book import ROOT, Fault
from exercise import replaced

PAGE = ROOT / "docs/ideas.md"
CHANGE = re.compile(r"^<!-- without (?P<idea>\w+) of (?P<step>\S+), (?P<file>\S+?): (?P<region>.+?) -->\n```cuda\n(?P<code>.*?)^```$",
                    re.MULTILINE | re.DOTALL)


def ideas():
    """Name of each idea, in the page's order → the step that it is taken out of, and the changes."""
    found = {}
    for change in CHANGE.finditer(PAGE.read_text(encoding="utf-8")):
        step, changes = found.setdefault(change["idea"], (change["step"], []))
        if step != change["step"]:
            raise Fault(f"{PAGE.name}: '{change['idea']}' is of {step} and of {change['step']}")
        changes.append(change)
    return found


def copy_without(idea, folder):
    """Makes the folder: the step's kernel, its chapter's headers and closed forms, and the changes."""
    step, changes = ideas()[idea]
    chapter = ROOT / "steps" / step.split("/")[0]
    files = [ROOT / "steps" / f"{step}.cu", *sorted(chapter.glob("*.h")), chapter / "closed_forms.cpp"]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.is_file()}
    for change in changes:
        path = ROOT / change["file"]
        try:
            texts[path] = replaced(texts[path], change["region"], change["code"])
        except (Fault, KeyError) as fault:
            raise Fault(f"{PAGE.name}: {idea}: {change['file']}: {fault}") from None
    folder.mkdir(parents=True)
    for path, text in texts.items():
        (folder / path.name).write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("idea", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    try:
        known = ideas()
        if arguments.all and not arguments.idea:
            wanted = {idea: ROOT / f"steps/30_without_{idea}" for idea in known}
        elif not arguments.idea:
            for idea, (step, _) in known.items():
                print(f"{idea:22} of {step}")
            return 0
        else:
            if arguments.all or arguments.idea not in known:
                raise Fault(f"there is no idea '{arguments.idea}'; there are {', '.join(known)}" if not arguments.all else "either one idea, or --all")
            if not arguments.folder or not re.fullmatch(r"\d\d_\w+", arguments.folder.name):
                raise Fault("say into which folder: two digits and a name, such as steps/20_mine")
            wanted = {arguments.idea: arguments.folder}
        for folder in wanted.values():
            if folder.exists():
                raise Fault(f"there is a folder {folder} already; remove it, or choose another")
        for idea, folder in wanted.items():
            copy_without(idea, folder)
            print(f"{folder}: {known[idea][0]} without {idea}")
    except Fault as fault:
        print(f"ideas.py: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
