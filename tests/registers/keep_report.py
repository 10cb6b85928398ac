#!/usr/bin/env python3
"""Runs nvcc and keeps what ptxas says of registers: keep_report.py NVCC ARGUMENT...

The lines that begin with "ptxas info" go to a file beside the object, OBJECT.ptxas; everything else is shown as ever.
"""
import subprocess
import sys
from pathlib import Path

command = sys.argv[1:]
if "-o" not in command or "-c" not in command:  # links, or asks for the version
    sys.exit(subprocess.run(command).returncode)
done = subprocess.run(command + ["-Xptxas=-v"], stderr=subprocess.PIPE, text=True, errors="replace")
report, shown = [], []
for line in done.stderr.splitlines(keepends=True):
    (report if line.startswith("ptxas info") or line.startswith("    ") else shown).append(line)
sys.stderr.writelines(shown)
Path(command[command.index("-o") + 1] + ".ptxas").write_text("".join(report), encoding="utf-8")
sys.exit(done.returncode)
