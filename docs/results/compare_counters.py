#!/usr/bin/env python3
"""Compares the CPU executor's counters with the GPU's, kernel by kernel, on the same shapes.

    compare_counters.py OUT.csv [--flashsteps build/flashsteps] [STEP ...]

Needs a GPU and Nsight Compute (ncu). For each step and shape it runs `flashsteps profile` on the CPU and `flashsteps
check` under ncu on the GPU, and writes a row a kernel and counter: what both say and their ratio. New chapters join by
running it again.
"""
import argparse
import csv
import datetime
import io
import json
import re
import subprocess
import sys

CASE = "== case: "  # in the file of --keep
SHAPES = ["--heads 2 --seq 512 --head-dim 64", "--heads 2 --seq 300 --seq-k 420 --head-dim 64 --causal"]
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_{}.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"  # of shuffles too, which use the same pipe
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
# What copies move: cp.async past L1 and TMA, which are not loads of a thread.
COPIES_IN = ["l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_access.sum", "l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld.sum"]
COPIES_OUT = ["l1tex__m_l1tex2xbar_write_sectors_mem_global_op_tma_st.sum", "l1tex__m_l1tex2xbar_write_sectors_mem_global_op_tma_red.sum"]
PRODUCTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_gmma.sum"  # of wgmma, which the executor does not count
OPCODES = "sass__inst_executed_per_opcode"  # its instances: "(LDS: 18,432; FFMA: 12,912; ...)"
METRICS = [OPCODES, REQUESTS.format("red"), SECTORS.format("ld"), SECTORS.format("st"), SECTORS.format("red"), REQUESTS.format("ld"), REQUESTS.format("st"),
           WAVEFRONTS, CONFLICTS, PRODUCTS] + COPIES_IN + COPIES_OUT


def run(command):
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def number(text):
    return float(text.replace(",", "") or 0)


def run_under_ncu(flashsteps, step, shape):
    # With all rows compared, a backward pass gets O and LSE from the oracle: no other kernel runs before it.
    return run(f"ncu --clock-control none --csv --page raw --print-metric-instances details --metrics {','.join(METRICS)} "
               f"{flashsteps} check {step} {shape} --device gpu")


def gpu_counters(text):
    """By kernel name, of its last launch."""
    rows = list(csv.reader(line for line in io.StringIO(text) if line.startswith('"')))
    titles, kernels = rows[0], {}
    for row in rows[2:]:  # the row between has the units
        of = dict(zip(titles, row))
        name = re.sub(r"^(void )?(<unnamed>|\(anonymous namespace\))::", "", of["Kernel Name"])
        name = re.split(r"[<(]", name)[0]
        executed = {opcode: number(count) for opcode, count in re.findall(r"(\w+): ([\d,]+)", of[OPCODES])}
        kernels[name] = {
            "global load sectors": sum(number(of[metric]) for metric in [SECTORS.format("ld")] + COPIES_IN),
            "global store sectors": sum(number(of[metric]) for metric in [SECTORS.format("st"), SECTORS.format("red")] + COPIES_OUT),
            "global requests": sum(number(of.get(REQUESTS.format(kind), "")) for kind in ("ld", "st", "red")),
            "shared wavefronts": number(of[WAVEFRONTS]) - number(of[PRODUCTS]),
            "bank conflicts": number(of[CONFLICTS]),
            "shuffles": executed.get("SHFL", 0),
            "barriers": executed.get("BAR", 0),
        }
    return kernels


def selects(prefix, step):
    """As on the command line: "08" and "08/ping" name 08_hopper_async/pingpong."""
    return all(part.startswith(begin) for part, begin in zip(step.split("/"), prefix.split("/")))


def cpu_counters(flashsteps, step, shape):
    kernels = {}
    for row in json.loads(run(f"{flashsteps} profile {step} {shape} --format json")):
        loads, stores = row["global_load_sectors"], row["global_store_sectors"]
        kernels[row["kernel"].split("<")[0]] = {
            "global load sectors": loads,
            "global store sectors": stores,
            "global requests": row["global_requests"],
            # The GPU's counter leaves out what cp.async writes: 16 bytes a thread, 128 a wavefront.
            "shared wavefronts": row["shared_wavefronts"] - row["async_copies"] / 8 + row["shuffles"],
            "bank conflicts": row["shared_wavefronts"] - row["shared_ideal_wavefronts"],
            "shuffles": row["shuffles"],
            "barriers": row["barrier_warps"],  # instructions: once for each warp that comes
        }
    return kernels


def keep(options, case, text):
    if options.keep:
        with open(options.keep, "a", encoding="utf-8") as file:
            file.write(f"{CASE}{case}\n{text}")


def read_kept(path):
    """What ncu said, by step and shape; under "" the first line of the result."""
    with open(path, encoding="utf-8") as file:
        parts = file.read().split(CASE)[1:]
    return dict(part.split("\n", 1) for part in parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("steps", nargs="*")
    parser.add_argument("--flashsteps", default="build/flashsteps")
    parser.add_argument("--keep", help="append what ncu says to this file")
    parser.add_argument("--kept", help="take what ncu said from this file; needs no GPU")
    options = parser.parse_intermixed_args()
    listed = json.loads(run(f"{options.flashsteps} list --format json"))
    if options.kept:
        kept = read_kept(options.kept)
    else:
        gpu = run("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader").strip().replace(",", ", driver", 1)
        kept = {"": f"# date {datetime.date.today()}; GPU {gpu}; command: docs/results/compare_counters.py {options.out}\n"}
        keep(options, "", kept[""])
    lines = []
    for step in listed:
        wanted = not options.steps or any(selects(prefix, step["id"]) for prefix in options.steps)
        if not wanted or "gpu" not in step["devices"]:
            continue
        for shape in SHAPES:
            case = f"{step['id']} {shape}"
            if options.kept and case not in kept:
                continue
            if not options.kept:
                kept[case] = run_under_ncu(options.flashsteps, step["id"], shape)
                keep(options, case, kept[case])
            there, here = gpu_counters(kept[case]), cpu_counters(options.flashsteps, step["id"], shape)
            for kernel, counters in here.items():
                for name, counted in counters.items():
                    measured = there.get(kernel, {}).get(name)
                    # Where there are neither shared memory nor shuffles the GPU counts one wavefront a warp all the same.
                    if counted or (measured and name != "shared wavefronts"):
                        ratio = "" if not measured else f"{counted / measured:.4f}"
                        lines.append([step["id"], shape.replace("--", ""), kernel, name, f"{counted:.0f}",
                                      "" if measured is None else f"{measured:.0f}", ratio])
    with open(options.out, "w", newline="", encoding="utf-8") as file:
        file.write(kept.get("", ""))
        writer = csv.writer(file)
        writer.writerow(["step", "shape", "kernel", "counter", "executor", "gpu", "ratio"])
        writer.writerows(lines)
    print(f"{len(lines)} counters compared")


main()
