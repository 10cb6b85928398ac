"""Runs every kernel on the GPU under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.

    python3 tests/sanitizers/run.py build/flashsteps [--csv results.csv] [--cases 16] [--limit 100] [--jobs 12]

One process for each pass of each step and each tool, several at a time, each with a time limit. Prints a line for each,
writes the same as CSV, and keeps what the tool said where it found something. Exit code 0: nothing was found, and all
checks passed.
"""
import argparse
import csv
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]
FOUND = 99  # compute-sanitizer's exit code when it found something


def passes_of_all_steps(flashsteps, only):
    listed = json.loads(subprocess.run([flashsteps, "list", *only, "--format", "json"], check=True, capture_output=True,
                                       text=True).stdout)
    return [(step["id"], one) for step in listed if step["min_sm"] > 0 for one in step["passes"]]


def run(job, options):
    """One tool on one pass of one step: a row of the result, and what was said."""
    (step, which), tool = job
    command = [options.sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), options.flashsteps, "check", step,
               "--pass", which, "--device", "gpu", "--random", str(options.cases), "--seed", str(options.seed)]
    start = time.monotonic()
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                             timeout=options.limit)
        said, code = ran.stdout, ran.returncode
    except subprocess.TimeoutExpired as e:
        said, code = (e.stdout or b"").decode(errors="replace"), None
    seconds = round(time.monotonic() - start, 1)
    # memcheck, synccheck, initcheck: "ERROR SUMMARY: 0 errors"; racecheck: "RACECHECK SUMMARY: 0 hazards displayed (…)"
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    found = int(summary[-1]) if summary else None
    if code is None:
        result = "time limit"
    elif found is None:
        result = "did not run"
    elif found > 0 or code == FOUND:
        result = "found"
    elif code != 0:
        result = "check failed"
    else:
        result = "ok"
    row = {"step": step, "pass": which, "tool": tool, "cases": options.cases, "seconds": seconds,
           "found": "" if found is None else found, "result": result}
    return row, said


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("flashsteps")
    parser.add_argument("steps", nargs="*", help="prefixes of steps; default: all")
    parser.add_argument("--csv", default="sanitizers.csv")
    parser.add_argument("--logs", help="folder for what the tools said where they found something")
    parser.add_argument("--cases", type=int, default=16, help="drawn cases for each step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=100, help="seconds for each process")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 4))
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    options = parser.parse_args()

    # The slow tool first, so that no long job starts when the others are done.
    tools = sorted(options.tools.split(","), key=lambda tool: tool != "racecheck")
    jobs = [(one, tool) for tool in tools for one in passes_of_all_steps(options.flashsteps, options.steps)]
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda job: run(job, options), jobs))

    results.sort(key=lambda r: (r[0]["step"], r[0]["pass"], tools.index(r[0]["tool"])))
    with open(options.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, results[0][0].keys())
        writer.writeheader()
        writer.writerows(row for row, said in results)
    bad = 0
    for row, said in results:
        print(f"{row['result']:12} {row['tool']:10} {row['found'] if row['found'] != '' else '-':>4} found "
              f"{row['seconds']:6} s  {row['step']} {row['pass']}")
        if row["result"] == "ok":
            continue
        bad += 1
        if options.logs:
            os.makedirs(options.logs, exist_ok=True)
            name = f"{row['step'].replace('/', '_')}_{row['pass']}_{row['tool']}.txt"
            with open(os.path.join(options.logs, name), "w") as file:
                file.write(said[:200000])
        elif bad <= 5:
            print("    " + "\n    ".join(said.splitlines()[:12]))
    print(f"{len(results)} runs, {bad} not ok, {time.monotonic() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
