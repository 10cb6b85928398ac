#!/usr/bin/env python3
"""Copies the chapters' kernels so that each synchronisation in them can be taken out.

    take_out.py STEPS_FOLDER OUTPUT_FOLDER [--list]

In the copies every call that makes threads, copies or products wait for each other,

    __syncthreads();                   becomes   (kept(17) ? void(__syncthreads()) : void());

where kept(17) is false when synchronisation 17 is out; of __syncthreads_or(x) the thread's own int(x) stays. Lines keep their numbers. OUTPUT_FOLDER/sites.inc lists the
sites for main.cpp, a line each: number, file, line, text. With --list only the names of the copies are printed.
"""
import re
import sys
from pathlib import Path

NAMES = re.compile(
    r"\b(__syncthreads(?:_or)?|__syncwarp|__threadfence(?:_block)?|named_barrier_sync|named_barrier_arrive"
    r"|cp_async_commit|cp_async_wait|mbarrier_init|mbarrier_arrive|mbarrier_arrive_expect_tx|mbarrier_wait"
    r"|fence_mbarrier_init|fence_proxy_async|bulk_commit|bulk_wait_read|bulk_wait"
    r"|wgmma_fence|wgmma_commit|wgmma_wait|store_release)\b")


def write_if_changed(path, text):
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def end_of_brackets(text, start, opening, closing):
    """The place behind the bracket that closes the one at `start`; None if it is not closed."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i + 1
    return None


def calls(text):
    """(begin, end) of each call statement of a synchronisation, without its semicolon, outside comments."""
    blank = re.sub(r"//[^\n]*", lambda m: " " * len(m.group()), text)
    for match in NAMES.finditer(blank):
        at = match.end()
        if blank[at] == "<":
            at = end_of_brackets(blank, at, "<", ">")
        if at is None or at >= len(blank) or blank[at] != "(":
            continue
        end = end_of_brackets(blank, at, "(", ")")
        if end is not None and re.match(r"\s*[;,]", blank[end:]):
            yield match.start(), end


def main():
    steps, output = Path(sys.argv[1]), Path(sys.argv[2])
    files = sorted(f for folder in steps.glob("[01][0-9]_*") for f in folder.iterdir() if f.suffix in (".cu", ".h"))
    if "--list" in sys.argv:
        print(";".join(str(output / f.relative_to(steps)) for f in files if f.suffix == ".cu"))
        return
    sites = []
    for file in files:
        text, copy, done = file.read_text(encoding="utf-8"), "", 0
        for begin, end in calls(text):
            call = text[begin:end]
            shown = re.sub(r"\s+", " ", call).replace("\\", "").replace('"', "'")
            name = file.relative_to(steps).as_posix()
            sites.append(f'{{{len(sites)}, "{name}", {text.count(chr(10), 0, begin) + 1}, "{shown}"}},')
            kept = f"::synchronisations::kept({len(sites) - 1})"
            if call.startswith("__syncthreads_or"):
                copy += text[done:begin] + f"({kept} ? {call} : int({call.split('(', 1)[1][:-1]}))"
            else:
                copy += text[done:begin] + f"({kept} ? void({call}) : void())"
            done = end
        copy += text[done:]
        target = output / file.relative_to(steps)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_if_changed(target, copy)
    write_if_changed(output / "sites.inc", "\n".join(sites) + "\n")


main()
