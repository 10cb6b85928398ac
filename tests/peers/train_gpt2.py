#!/usr/bin/env python3
"""Trains a GPT-2-sized model with this library's attention, and with others: same numbers, less time and memory?

    python3 tests/peers/train_gpt2.py build/libflashsteps.so [--csv FILE] [--losses FILE]

The model is GPT-2 medium (24 layers, 16 heads of 64) in PyTorch, its weights drawn from one seed; it learns the bytes of
this course's own pages and kernels. All runs see the same batches. Only the attention differs:

    operations     matrix product, mask, softmax, dropout, matrix product, each an operation of PyTorch, N x N matrices in HBM
    07             07_warp_partitioning/pipelined and backward, through the C interface
    08             08_hopper_async/overlapped and backward (on Hopper)
    flash2         PyTorch's scaled_dot_product_attention with its FlashAttention-2

At N 1,024 without dropout the runs take 50 steps and their losses are compared; the others take a few steps for time
and memory. Exit code 0: every loss is within 2 % of that of "operations"; 1: one is not; 2: cannot be run.
"""
import argparse
import csv
import gc
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashsteps_torch import Steps, fs, measured_on

LAYERS, HEADS, WIDTH, VOCABULARY = 24, 16, 1024, 50304  # GPT-2 medium; its vocabulary in full 64s
TOKENS = 8192  # a step
STEPS, TIMED_STEPS = 50, 10
RATE, WARM_UP = 6e-5, 10  # AdamW's learning rate, small as the batches are, and in how many steps it rises to that
LOSS_TOLERANCE = 0.02
COLUMNS = "attention,seq,batch,dropout,steps,ms_per_step,peak_bytes,attention_ms_per_step,last_loss,error".split(",")


# ---- The attentions


def operations(q, k, v, dropout, mask):
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    p = scores.masked_fill(mask, -torch.inf).softmax(-1)
    return F.dropout(p, dropout) @ v


def flash2(q, k, v, dropout, mask):
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Ours:
    """Two steps of the course; each call draws its dropout mask from a seed of its own."""

    def __init__(self, steps, forward, backward):
        self.steps, self.forward, self.backward, self.seed = steps, forward, backward, 0

    def __call__(self, q, k, v, dropout, mask):
        self.seed += 1
        return self.steps.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), self.forward, self.backward, causal=True,
                                    dropout=dropout, seed=self.seed)


# ---- The model (Radford et al. 2019)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, attention, dropout, mask):
        B, N, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, N, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        o = attention(q, k, v, dropout, mask).transpose(1, 2).reshape(B, N, WIDTH)
        x = x + self.out(o)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, longest):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(longest, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * LAYERS) ** 0.5 if deep else 0.02)

    def forward(self, tokens, targets, attention, dropout, mask):
        x = self.token(tokens) + self.place.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attention, dropout, mask)
        logits = self.norm(x) @ self.token.weight.T
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


# ---- Training


def corpus():
    """The bytes of the pages and kernels, in order."""
    root = Path(__file__).resolve().parent.parent.parent
    files = sorted(root.glob("docs/*.md")) + sorted(root.glob("steps/*/*.cu")) + sorted(root.glob("steps/*/*.h"))
    data = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(attention, N, dropout, count, data):
    """Milliseconds of each step, losses, and the most memory that was in use."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    B = TOKENS // N
    with torch.device("cuda"):
        model = GPT2(N)
        mask = torch.ones(N, N, dtype=torch.bool).triu(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    places = torch.Generator().manual_seed(1)
    times, losses = [], []
    for step in range(count):
        starts = torch.randint(len(data) - N - 1, (B,), generator=places)
        batch = torch.stack([data[s:s + N + 1] for s in starts]).cuda()
        for settings in optimizer.param_groups:
            settings["lr"] = RATE * min(1, (step + 1) / WARM_UP)
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:], attention, dropout, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        losses.append(loss.item())
    return times, losses, torch.cuda.max_memory_allocated()


def attention_alone(attention, N, dropout):
    """Milliseconds of the attention of one step, forward and backward: all layers."""
    B, D = TOKENS // N, WIDTH // HEADS
    q, k, v = (torch.randn(B, HEADS, N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    d_o = torch.randn_like(q)
    mask = torch.ones(N, N, dtype=torch.bool, device="cuda").triu(1)
    times = []
    for _ in range(10):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # the host gets ahead of the GPU
        start.record()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            o = attention(q, k, v, dropout, mask)
        torch.autograd.grad(o, (q, k, v), d_o)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return LAYERS * statistics.median(times[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--csv", help="write a row a run to this file")
    parser.add_argument("--losses", help="write the losses by step to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(print("train_gpt2.py: PyTorch sees no GPU here", file=sys.stderr) or 2)
    try:
        steps = Steps(options.library)
    except (OSError, fs.Error) as error:
        sys.exit(print(f"train_gpt2.py: {error}", file=sys.stderr) or 2)
    here = {step.id for step in steps.gpu_steps()}
    attentions = {"operations": operations}
    for name, pair in (("07", ("07_warp_partitioning/pipelined", "07_warp_partitioning/backward")),
                       ("08", ("08_hopper_async/overlapped", "08_hopper_async/backward"))):
        if here.issuperset(pair):
            attentions[name] = Ours(steps, *pair)
    attentions["flash2"] = flash2

    data = corpus()
    rows, curves = [], {}
    for N, dropout, count in ((1024, 0.0, STEPS), (1024, 0.1, TIMED_STEPS), (2048, 0.0, TIMED_STEPS), (4096, 0.0, TIMED_STEPS)):
        for name, attention in attentions.items():
            if dropout > 0 and name == "08":  # chapter 08 has no dropout
                continue
            try:
                times, losses, peak = train(attention, N, dropout, count, data)
                row = [name, N, TOKENS // N, dropout, count, f"{statistics.median(times[3:]):.5g}", peak,
                       f"{attention_alone(attention, N, dropout):.5g}", f"{losses[-1]:.5g}", ""]
                if count == STEPS:
                    curves[name] = losses
            except torch.cuda.OutOfMemoryError:
                row = [name, N, TOKENS // N, dropout, count, "", "", "", "", "out of memory"]
            rows.append(row)
            print("  ".join(map(str, row)), flush=True)

    note = (f"{measured_on()}; GPT-2 medium, bf16 autocast, "
            f"{TOKENS} tokens a step; command: tests/peers/train_gpt2.py build/libflashsteps.so --csv FILE --losses FILE")
    tables = [(options.csv, [COLUMNS, *rows]),
              (options.losses, [["step", *curves]] + [[i + 1, *(f"{c[i]:.6g}" for c in curves.values())] for i in range(STEPS)])]
    for path, table in tables:
        if path:
            with open(path, "w", newline="", encoding="utf-8") as file:
                print(note, file=file)
                csv.writer(file, lineterminator="\n").writerows(table)
    failed = 0
    for name, losses in curves.items():
        apart = max(abs(a - b) / b for a, b in zip(losses, curves["operations"]))
        good = apart <= LOSS_TOLERANCE  # a NaN is not
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {name}: loss {losses[0]:.3f} to {losses[-1]:.3f}, at most {100 * apart:.2f} % from \"operations\"")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
