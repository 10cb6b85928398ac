#!/usr/bin/env python3
"""No kernel keeps registers in memory: no_spills.py FOLDER CHAPTER...

Reads the reports that keep_report.py left in the build's FOLDER, of the named chapters' kernel files. A kernel that
spills, or whose arrays are in local memory, fails; so does one whose wgmma ptxas has serialised or helped along (its
notes C7510 to C7519), and a chapter without a report. Prints the most registers that a kernel of each file takes.
"""
import re
import sys
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALISED = re.compile(r"\(C75\d\d\)")
REGISTERS = re.compile(r"Used (\d+) registers")

failed = False
for chapter in sys.argv[2:]:
    reports = sorted(Path(sys.argv[1]).rglob(f"{chapter}/*.ptxas"))
    kernels = 0
    for report in reports:
        kernel, most = None, {}
        for line in report.read_text(encoding="utf-8").splitlines():
            if match := ENTRY.search(line):
                kernel, kernels = match.groups(), kernels + 1
            elif SERIALISED.search(line):
                failed = True
                print(f"{chapter}/{report.name}: {line.strip()}")
            elif match := MEMORY.search(line):
                if any(int(number) for number in match.groups()):
                    failed = True
                    print(f"{chapter}/{report.name}: {kernel[1]}: {match.group()}: {kernel[0]}")
            elif (match := REGISTERS.search(line)) and kernel:
                most[kernel[1]] = max(most.get(kernel[1], 0), int(match.group(1)))
        print(f"{chapter}/{report.name}: at most " + ", ".join(f"{n} registers on {sm}" for sm, n in sorted(most.items())))
    if not kernels:
        failed = True
        print(f"{chapter}: no report of any kernel in {sys.argv[1]}")
sys.exit(1 if failed else 0)
