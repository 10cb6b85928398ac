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
import sys
from pathlib import Path

from book import ROOT, Fault
from exercise import change, require_new, write_copy

PAGE = ROOT / "docs/ideas.md"
CHANGE = re.compile(r"^<!-- without (?P<idea>\w+) of (?P<step>\S+), (?P<file>\S+?): (?P<region>.+?) -->\n```cuda\n(?P<code>.*?)^```$",
                    re.MULTILINE | re.DOTALL)


def ideas():
    """Name of each idea, in the page's order → the step that it is taken out of, and the changes."""
    found = {}
    for wanted in CHANGE.finditer(PAGE.read_text(encoding="utf-8")):
        step, changes = found.setdefault(wanted["idea"], (wanted["step"], []))
        if step != wanted["step"]:
            raise Fault(f"{PAGE.name}: '{wanted['idea']}' is of {step} and of {wanted['step']}")
        changes.append(wanted)
    return found


def files(idea):
    """Path of the kernel, and of each header that changes → its text without the idea."""
    step, changes = ideas()[idea]
    kernel = f"steps/{step}.cu"
    try:
        texts = {kernel: (ROOT / kernel).read_text(encoding="utf-8")}
        for wanted in changes:
            change(texts, wanted["file"], wanted["region"], wanted["code"])
    except (Fault, OSError) as fault:
        raise Fault(f"{PAGE.name}: {idea}: {fault}") from None
    texts[kernel] = f"// Without {idea} (docs/ideas.md), of which the comments still speak.\n" + texts[kernel].replace(
        '.idea = "', f'.idea = "without {idea}: ', 1)
    return texts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("idea", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    try:
        known = ideas()
        if arguments.all and arguments.idea:
            raise Fault("either one idea, or --all")
        if arguments.all:
            wanted = {idea: ROOT / f"steps/30_without_{idea}" for idea in known}
        elif not arguments.idea:
            for idea, (step, _) in known.items():
                print(f"{idea:22} of {step}")
            return 0
        elif arguments.idea in known:
            wanted = {arguments.idea: arguments.folder}
        else:
            raise Fault(f"there is no idea '{arguments.idea}'; there are {', '.join(known)}")
        for folder in wanted.values():
            require_new(folder)
        texts = {idea: files(idea) for idea in wanted}
        for idea, folder in wanted.items():
            write_copy(folder, texts[idea])
            print(f"{folder}: {known[idea][0]} without {idea}")
    except Fault as fault:
        print(f"ideas.py: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
