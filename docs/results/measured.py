"""The measured data beside this file, read. In the CSV files lines that begin with # say when, where and by which command
they were measured; they become the notes below tables and plots."""
import csv
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parent.parent


class TableError(Exception):
    """Something that cannot be made from what there is, in one line."""


def read(name):
    """Rows of a CSV file as dictionaries, and its comment lines."""
    path = RESULTS / name
    if not path.is_file():
        raise TableError(f"there is no docs/results/{name}")
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ").rstrip() for line in lines if line.startswith("#")]
    rows = list(csv.DictReader(line for line in lines if line and not line.startswith("#")))
    if not rows:
        raise TableError(f"docs/results/{name} has no row")
    return rows, comments


def rates(comments):
    """fp32 FLOP/s and HBM bytes/s that `flashsteps bench` measured in the same run."""
    text = " ".join(comments)
    flops, copy = re.search(r"([\d.]+) TFLOP/s fp32", text), re.search(r"copy ([\d.]+) GB/s", text)
    if not flops or not copy:
        raise TableError("the comments do not say '… TFLOP/s fp32, copy … GB/s'")
    return float(flops[1]) * 1e12, float(copy[1]) * 1e9


SHAPE = ("head_dim", "causal", "seq", "batch", "heads")
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
PEERS = {"math": "PyTorch, unfused", "efficient": "PyTorch, memory-efficient", "flash2": "PyTorch, FlashAttention-2", "cudnn": "PyTorch, cuDNN"}


def peer_rows(dtype, what, chapter=""):
    """PyTorch's attention in this precision and pass, from whichever h200_peers_*.csv has it, and those files' comments. A
    chapter whose bench had peers beside it of its own (…_07.csv) gets these, all others the rest."""
    own, rest = ([], []), ([], [])
    for path in sorted(RESULTS.glob("h200_peers_*.csv")):
        of = re.search(r"_(\d\d)$", path.stem)
        rows, sources = own if of and of[1] == chapter[:2] else rest
        if of and of[1] != chapter[:2]:
            continue
        data, comments = read(path.name)
        mine = [r for r in data if DTYPES.get(r["dtype"], r["dtype"]) == dtype and r["peer"] in PEERS and r["what"] == what]
        if mine:
            rows += mine
            sources.append((path.name, comments))
    return own if own[0] else rest


def same_shape(a, b):
    return all(int(a[key]) == int(b[key]) for key in SHAPE)


def bench_rows(what):
    """Rows of all h200_bench_*.csv of one pass, but for those in deterministic mode."""
    rows = []
    for path in sorted(RESULTS.glob("h200_bench_*.csv")):
        if "deterministic" not in path.name:
            rows += [r for r in read(path.name)[0] if r["pass"] == what]
    return rows


def ceilings():
    """FLOP/s of cuBLAS's bf16 matrix product and bytes/s of a copy, the best of what the peers' files have."""
    flops = copy = 0.0
    for path in sorted(RESULTS.glob("h200_peers_*.csv")):
        for r in read(path.name)[0]:
            if r["peer"] == "cublas_bf16_8192" and r["tflops"]:
                flops = max(flops, float(r["tflops"]) * 1e12)
            if r["what"] == "bandwidth" and r["gbps"]:
                copy = max(copy, float(r["gbps"]) * 1e9)
    if not flops or not copy:
        raise TableError("no h200_peers_*.csv has the rows cublas_bf16_8192 and bandwidth")
    return flops, copy


def gpu_and_date(names):
    """"NVIDIA H200, 2026-11-29 to 2026-11-30" for the files of these names."""
    text = " ".join(" ".join(read(name)[1]) for name in names)
    gpus = sorted(set(re.findall(r"GPU (NVIDIA [\w ]+?),", text)))
    dates = sorted(set(re.findall(r"date (\d{4}-\d\d-\d\d)", text)))
    return ", ".join(gpus) + ", " + (dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}")
