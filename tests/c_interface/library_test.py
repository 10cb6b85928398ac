#!/usr/bin/env python3
"""Steps of every chapter, called through the C interface on the CPU executor, against the golden values.

    python3 tests/c_interface/library_test.py build/libflashsteps.so
"""
import csv
import ctypes
import math
import struct
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "steps" / "c_interface"))
import flashsteps as fs

CASES = ("plain_17", "causal_33_65", "causal_65_33")
# By chapter: a step with the pass, its dtype. Gradients of 07 and 08 take O and LSE of a forward pass of the same chapter.
FORWARD_STEPS = [("01/attention", fs.FP64), ("01/attention", fs.FP32), ("02/forward", fs.FP32), ("03/shared", fs.FP32),
                 ("04/online", fs.FP32), ("05/forward", fs.FP32), ("07/split_q", fs.FP16), ("08/overlapped", fs.BF16)]
BACKWARD_STEPS = [("01/attention", "01/attention", fs.FP64), ("02/forward", "02/backward", fs.FP32),
                  ("05/forward", "06/backward", fs.FP32), ("07/pipelined", "07/backward", fs.FP16)]
# Largest relative error of a norm, and of an entry against the tensor's largest: some roundings of the format. (That a
# step is right to the error rule is what `flashsteps check` shows; here, that the interface hands it the right arrays.)
TOLERANCE = {fs.FP64: 1e-14, fs.FP32: 1e-6, fs.FP16: 1e-3, fs.BF16: 8e-3}
GRADIENTS = 5  # times that: they are differences of larger numbers


def golden_cases():
    cases = {}
    with open(ROOT / "tests" / "data" / "golden.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            cases.setdefault(row["case"], []).append(row)
    return cases


def golden_numbers(count, salt, gain):
    """The formula of tests/data/README.md."""
    return [((((i * 2654435761 + salt * 40503) & 0xFFFFFFFF) >> 24) - 128) / 64 * gain for i in range(count)]


def f16_bits(x):
    return struct.unpack("<H", struct.pack("<e", x))[0]


def bf16_bits(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def encode(dtype, values):
    if dtype in (fs.FP64, fs.FP32):
        return ((ctypes.c_double if dtype == fs.FP64 else ctypes.c_float) * max(1, len(values)))(*values)
    bits = f16_bits if dtype == fs.FP16 else bf16_bits
    return (ctypes.c_uint16 * max(1, len(values)))(*map(bits, values))


def decode(dtype, array, count):
    if dtype in (fs.FP64, fs.FP32):
        return array[:count]
    if dtype == fs.FP16:
        return [struct.unpack("<e", struct.pack("<H", x))[0] for x in array[:count]]
    return [struct.unpack("<f", struct.pack("<I", x << 16))[0] for x in array[:count]]


class Run:
    """The tensors of a golden case in a dtype, and what the passes make of them."""

    def __init__(self, library, rows, dtype):
        first = rows[0]
        self.library, self.rows, self.dtype = library, rows, dtype
        heads, D = int(first["heads"]), int(first["head_dim"])
        self.problem = fs.Problem(batch=int(first["batch"]), heads=heads, kv_heads=heads, seq_q=int(first["seq_q"]),
                                  seq_k=int(first["seq_k"]), head_dim=D, causal=int(first["causal"]), dtype=dtype,
                                  scale=float(first["scale"] or 1 / math.sqrt(D)))
        p, gain = self.problem, float(first["gain"])
        rows_q, rows_k = p.batch * heads * p.seq_q, p.batch * heads * p.seq_k
        self.counts = dict(q=rows_q * D, k=rows_k * D, v=rows_k * D, o=rows_q * D, lse=rows_q, d_o=rows_q * D,
                           dq=rows_q * D, dk=rows_k * D, dv=rows_k * D)
        self.arrays = {name: encode(dtype, golden_numbers(self.counts[name], salt, 1 if name == "d_o" else gain))
                       for salt, name in enumerate(("q", "k", "v", "d_o"), 1)}
        for name in ("o", "dq", "dk", "dv"):
            self.arrays[name] = encode(dtype, [math.nan] * self.counts[name])
        self.lse_dtype = fs.FP64 if dtype == fs.FP64 else fs.FP32
        self.arrays["lse"] = encode(self.lse_dtype, [math.nan] * self.counts["lse"])

    def call(self, step, pass_):
        _, saved = self.library.memory_needed(step, pass_, fs.CPU, self.problem)
        self.arrays.setdefault("saved", (ctypes.c_uint8 * max(1, saved))())
        self.library.run(step, pass_, fs.CPU, self.problem, {name: ctypes.addressof(a) for name, a in self.arrays.items()})

    def worst(self, names):
        """The largest error of these tensors, as TOLERANCE means it."""
        worst = 0.0
        for name in names:
            values = decode(self.lse_dtype if name == "lse" else self.dtype, self.arrays[name], self.counts[name])
            finite = [x for x in values if math.isfinite(x)]
            largest = max(map(abs, finite))
            mine = [row for row in self.rows if row["tensor"].lower() == name]
            assert mine, f"golden.csv has no {name}"
            for row in mine:
                expected = float(row["value"])
                if row["kind"] == "at":
                    found = values[int(row["index"])]
                    error = 0.0 if found == expected else abs(found - expected) / largest
                elif row["kind"] == "norm":
                    error = abs(math.sqrt(math.fsum(x * x for x in finite)) - expected) / expected
                else:
                    continue
                worst = worst if error <= worst else error  # a NaN is taken, and stays
        return worst


def main(path):
    library = fs.Library(path)
    failed = 0

    def check(what, good, note=""):
        nonlocal failed
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {what}{note}")

    cases = golden_cases()
    for name in CASES:
        for step, dtype in FORWARD_STEPS:
            run = Run(library, cases[name], dtype)
            why = library.why_not(step, fs.FORWARD, fs.CPU, run.problem)
            if why:
                check(f"{name}, {step} is refused for its head dim", "head dim" in why)
                continue
            run.call(step, fs.FORWARD)
            error = run.worst(("o", "lse"))
            check(f"{name}, {step} forward", error <= TOLERANCE[dtype], f": error {error:.1e}")
        for forward, backward, dtype in BACKWARD_STEPS:
            run = Run(library, cases[name], dtype)
            why = library.why_not(backward, fs.BACKWARD, fs.CPU, run.problem)
            if why:
                check(f"{name}, {backward} is refused for its head dim", "head dim" in why)
                continue
            run.call(forward, fs.FORWARD)
            run.call(backward, fs.BACKWARD)
            error = run.worst(("dq", "dk", "dv"))
            check(f"{name}, {backward} backward", error <= GRADIENTS * TOLERANCE[dtype], f": error {error:.1e}")

    # Threads take turns: their results, and their errors, are their own.
    def one_thread(number, good):
        for _ in range(3):
            run = Run(library, cases["plain_17"], fs.FP32)
            run.call("05/forward", fs.FORWARD)
            problem = fs.Problem(batch=1, heads=1, kv_heads=1, seq_q=8, seq_k=8, head_dim=1000 + number, dtype=fs.FP32)
            why = library.why_not("05/forward", fs.FORWARD, fs.CPU, problem)
            good.append(run.worst(("o", "lse")) <= TOLERANCE[fs.FP32] and f"head dim {1000 + number};" in why)

    good = []
    threads = [threading.Thread(target=one_thread, args=(number, good)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check("four threads at a time", len(good) == 12 and all(good))

    ids = [step.id for step in library.steps()]
    folders = {p.parent.name + "/" + p.stem for p in (ROOT / "steps").glob("[0-9][0-9]_*/*.cu")} | {"01_cpu_attention/attention"}
    check("the steps are the chapters' files", set(ids) == folders)
    for name, problem, part in (("05", {}, "give one of these ids"), ("99", {}, "there is no step"),
                                ("05/forward", {"head_dim": 48}, "head dim 48"), ("05/forward", {"kv_heads": 3}, "does not divide"),
                                ("05/forward", {"dtype": 9}, "dtype"), ("05/forward", {"scale": math.inf}, "finite")):
        asked = fs.Problem(**{**dict(batch=1, heads=2, kv_heads=2, seq_q=8, seq_k=8, head_dim=64, scale=1, dtype=fs.FP32), **problem})
        why = library.why_not(name, fs.FORWARD, fs.CPU, asked) or ""
        check(f"{name} {problem} is refused", part in why, f": {why[:90]}")
    # More bytes than can be counted are refused, not counted from 0 again.
    long = fs.Problem(batch=1, heads=4, kv_heads=4, seq_q=2**30, seq_k=2**30, head_dim=32, scale=1, dtype=fs.FP32)
    for step, pass_ in (("01/attention", fs.FORWARD), ("02/forward", fs.FORWARD), ("02/backward", fs.BACKWARD),
                        ("03/shared", fs.FORWARD), ("04/three_pass", fs.FORWARD)):
        try:
            why = str(library.memory_needed(step, pass_, fs.CPU, long))
        except fs.Error as error:
            why = str(error)
        check(f"{step} with 2^62 scores is refused", "at most 2^59" in why and why == library.why_not(step, pass_, fs.CPU, long),
              f": {why[:60]}")
    asked = fs.Problem(batch=1, heads=0, kv_heads=2, seq_q=8, seq_k=8, head_dim=64, scale=1, dtype=fs.FP32)
    why = library.why_not("05/forward", fs.FORWARD, fs.CPU, asked)
    check("no query heads on two key heads are supported", why is None, f": {why}")
    why = library.why_not("05/forward\n\r", fs.FORWARD, fs.CPU, asked) or ""
    check("a message is one line, whatever it quotes", "there is no step" in why and len(why.splitlines()) == 1)
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: library_test.py build/libflashsteps.so")
    sys.exit(main(sys.argv[1]))
