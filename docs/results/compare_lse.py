#!/usr/bin/env python3
"""Compares LSE of 08/fp8 on the GPU with the CPU executor's at large scores: how exactly tensor cores add e4m3 products.

    compare_lse.py OUT.csv [--flashsteps build/flashsteps] [--devices gpu cpu]

With one key a query LSE is its score. 16 heads of 128 queries, normal numbers that bf16 and fp32 hold exactly, scores five
times their dot product; a row of OUT.csv a head dim. Page 08's table is made of it. Needs a GPU, and nothing but Python.
"""
import argparse
import array
import ast
import datetime
import math
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HEADS, QUERIES, SCALE = 16, 128, 5
COLUMNS = ["head_dim", "score_rms", "difference_rms", "largest_difference", "largest_score", "mean_nearer_to_0", "rounding_rms"]


def write_npy(path, shape, values):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + array.array("f", values).tobytes())


def read_npy(path):
    data = path.read_bytes()
    end = 10 + struct.unpack("<H", data[8:10])[0]
    kind = {"<f4": "f", "<f8": "d"}[ast.literal_eval(data[10:end].decode())["descr"]]
    return list(array.array(kind, data[end:]))


def normal_numbers(count):
    """Rounded to the eight bits of bf16."""
    numbers = []
    for _ in range(count):
        fraction, exponent = math.frexp(random.gauss(0, 1))
        numbers.append(math.ldexp(round(fraction * 256), exponent - 8))
    return numbers


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def rms(values):
    return math.sqrt(sum(x * x for x in values) / len(values))


def row(options, head_dim, folder):
    random.seed(head_dim)
    Q, K = normal_numbers(HEADS * QUERIES * head_dim), normal_numbers(HEADS * head_dim)
    for name, length, values in (("q", QUERIES, Q), ("k", 1, K), ("v", 1, K)):
        write_npy(folder / f"{name}.npy", (1, HEADS, length, head_dim), values)
    gpu, executor = [], []
    for scores, device in zip((gpu, executor), options.devices):
        out = folder / f"{head_dim}_{len(executor)}"
        run([options.flashsteps, "run", "08/fp8", "--dtype", "e4m3", "--scale", str(SCALE), "--no-rotation", "--device", device, "--out", out,
             *(part for name in "qkv" for part in (f"--{name}", folder / f"{name}.npy"))])
        scores += read_npy(out / "lse.npy")
    exact = [SCALE * sum(Q[i * head_dim + d] * K[i // QUERIES * head_dim + d] for d in range(head_dim)) for i in range(HEADS * QUERIES)]
    differences = [there - here for there, here in zip(gpu, executor)]
    return [head_dim, rms(executor), rms(differences), max(map(abs, differences)), max(map(abs, executor)),
            sum(abs(here) - abs(there) for there, here in zip(gpu, executor)) / len(gpu),
            rms([here - x for here, x in zip(executor, exact)])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--flashsteps", default="build/flashsteps")
    parser.add_argument("--devices", nargs=2, default=["gpu", "cpu"], help="other ones, to try the script without a GPU")
    options = parser.parse_args()
    on, command = "none", f"docs/results/compare_lse.py {options.out.name}"
    if options.devices != ["gpu", "cpu"]:
        command += " --devices " + " ".join(options.devices)
    if "gpu" in options.devices:
        on = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).splitlines()[0].replace(",", ", driver", 1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(options, head_dim, Path(folder)) for head_dim in (64, 128, 256)]
    lines = [f"# date {datetime.date.today()}; GPU {on}; command: {command}", ",".join(COLUMNS)]
    lines += [",".join(f"{x:.6g}" for x in r) for r in rows]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
