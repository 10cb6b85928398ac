#!/usr/bin/env python3
"""One long sequence through attention, forward and backward: time and memory, until memory runs out.

    python3 tests/peers/long_sequences.py build/libflashsteps.so [--csv FILE]

16 heads of 64 (GPT-2 medium's attention), batch 1, causal, bf16, N from 1,024 to 262,144. A row a kernel and length:
"operations" is attention operation by operation in PyTorch, flash2 PyTorch's FlashAttention-2, the others are steps of the
course. peak_bytes: the most memory in use beyond Q, K, V and dO. Rows of what = "workspace" are not run: they say what
`flashsteps_memory_needed` tells of a step's workspace, and of what it keeps for its backward pass.

Exit code 0: the steps' O agrees with FlashAttention-2's at every length; 1: it does not; 2: cannot be run.
"""
import argparse
import csv
import gc
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashsteps_torch import NAMES, Steps, fs, measured_on

HEADS, D = 16, 64
LENGTHS = [1 << n for n in range(10, 19)]
COLUMNS = "what,dtype,head_dim,causal,seq,batch,heads,ms,peak_bytes,error".split(",")
PAIRS = {"07": ("07_warp_partitioning/pipelined", "07_warp_partitioning/backward"),
         "08": ("08_hopper_async/overlapped", "08_hopper_async/backward")}
TOLERANCE = 0.01  # of ||O - O'|| / ||O'||: two results that are rounded to bf16 are about 0.003 apart


def operations(q, k, v):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return ((q @ k.transpose(-1, -2)) * D ** -0.5).masked_fill(mask, -torch.inf).softmax(-1) @ v


def flash2(q, k, v):
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def run(attention, N):
    """Milliseconds and memory of forward and backward, and O."""
    generator = torch.Generator("cuda").manual_seed(N)
    q, k, v, d_o = (torch.randn(1, HEADS, N, D, device="cuda", generator=generator).bfloat16() for _ in range(4))
    for t in (q, k, v):
        t.requires_grad_()
    for _ in range(2 if N < 100_000 else 1):  # the first warms up
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(5_000_000)  # some milliseconds, in which the host gets ahead of the GPU
        start.record()
        o = attention(q, k, v)
        gradients = torch.autograd.grad(o, (q, k, v), d_o)
        stop.record()
        stop.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        o = o.detach()
        del gradients
    return start.elapsed_time(stop), peak, o


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--csv", help="write the rows to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(print("long_sequences.py: PyTorch sees no GPU here", file=sys.stderr) or 2)
    try:
        steps = Steps(options.library)
    except (OSError, fs.Error) as error:
        sys.exit(print(f"long_sequences.py: {error}", file=sys.stderr) or 2)
    here = {step.id for step in steps.gpu_steps()}
    attentions = {"flash2": flash2}
    for name, (forward, backward) in PAIRS.items():
        if here.issuperset((forward, backward)):
            attentions[name] = lambda q, k, v, forward=forward, backward=backward: steps.attention(q, k, v, forward, backward, causal=True)
    attentions["operations"] = operations

    rows, failed = [], 0
    for N in LENGTHS:
        expected = None
        for name, attention in attentions.items():
            row = [name, "bf16", D, 1, N, 1, HEADS]
            try:
                ms, peak, o = run(attention, N)
                row += [f"{ms:.5g}", peak, ""]
                if name == "flash2":
                    expected = o.float()
                elif expected is not None:
                    apart = ((o.float() - expected).norm() / expected.norm()).item()
                    if not apart <= TOLERANCE:
                        failed += 1
                        print(f"FAIL {name} at N {N}: O is {apart:.2e} from FlashAttention-2's")
            except torch.cuda.OutOfMemoryError:
                row += ["", "", "out of memory"]
            o = None
            rows.append(row)
            print("  ".join(map(str, row)), flush=True)
        for step in steps.gpu_steps():
            problem = fs.Problem(batch=1, heads=HEADS, kv_heads=HEADS, seq_q=N, seq_k=N, head_dim=D, scale=D ** -0.5, causal=1,
                                 dtype=step.dtypes[-1])
            pass_ = fs.FORWARD if step.forward else fs.BACKWARD
            if not steps.library.why_not(step.id, pass_, fs.GPU, problem):
                workspace, saved = steps.memory_needed(step.id, pass_, problem)
                rows.append([f"workspace of {step.id}", NAMES[step.dtypes[-1]], D, 1, N, 1, HEADS, "", workspace + saved, ""])
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            print(f"{measured_on()}; forward and backward; command: tests/peers/long_sequences.py build/libflashsteps.so --csv FILE", file=file)
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
