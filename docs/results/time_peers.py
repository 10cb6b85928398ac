#!/usr/bin/env python3
"""Times PyTorch's attention kernels by the protocol of `flashsteps bench`: time_peers.py forward|backward FILE.csv

16,384 tokens in all, hidden size 2,048, N from 512 to 16,384, full and causal, normal random inputs. After 0.2 s of rest
three launches warm up; then launches are queued one behind the other, each between two CUDA events, and the median
counts. FLOPs: forward 4·B·H·N²·D, half of it when causal, backward 2.5 times as many. With
--sustained forward adds rows of 40 launches, N 8k and 16k, whose clock is that of a busy chip.
"""
import argparse
import csv
import datetime
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, HIDDEN, LENGTHS = 16384, 2048, (512, 1024, 2048, 4096, 8192, 16384)
PEERS = {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
         "math": SDPBackend.MATH}  # 16 bits: the first two; operation by operation is "math"
MATH_BYTES = 100e9  # of six N² matrices in fp32, which "math" may have at once: longer ones are left out
REST, WARM_UP = 0.2, 3


def median_ms(call, launches):
    call()
    torch.cuda.synchronize()
    time.sleep(REST)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + launches)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events[WARM_UP:])


def attention(rows, what, dtype, peers, sustained, batch, heads, length, head_dim, causal):
    q, k, v, grad = (torch.randn(batch, heads, length, head_dim, device="cuda", dtype=dtype) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_(what == "backward")
    forward_flops = 4 * batch * heads * length * length * head_dim * (0.5 if causal else 1.0)
    shape = dict(dtype=str(dtype).split(".")[1], head_dim=head_dim, causal=int(causal), seq=length, batch=batch, heads=heads)
    for peer in peers:
        if peer == "math" and 6 * 4 * batch * heads * length * length > MATH_BYTES:
            continue
        with sdpa_kernel([PEERS[peer]]):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            def call():
                if what == "backward":
                    torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
                else:
                    F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            if what == "backward":  # the memory of both passes: what is kept for this one, and the gradients
                call()
            extra = (torch.cuda.max_memory_allocated() - before) / 1e6
            flops = 2.5 * forward_flops if what == "backward" else forward_flops
            for name, launches in ((what, 11), (what + ", sustained", 40)):
                if name == what or (sustained and length >= 8192):
                    ms = median_ms(call, launches)
                    rows.append(dict(shape, peer=peer, what=name, ms=ms, tflops=flops / ms / 1e9, peak_extra_mb=extra))
            del out


def ceilings(rows):
    """What cuBLAS and a copy reach on this card."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ms = median_ms(lambda: a @ b, 11)
    rows.append(dict(peer="cublas_bf16_8192", what="gemm", ms=ms, tflops=2 * 8192**3 / ms / 1e9))
    x = torch.randn(1 << 30, device="cuda")
    y = torch.empty_like(x)
    ms = median_ms(lambda: y.copy_(x), 11)
    rows.append(dict(peer="copy_4GiB", what="bandwidth", ms=ms, gbps=2 * x.numel() * 4 / ms / 1e6))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["forward", "backward"])
    parser.add_argument("out")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=["flash2", "cudnn"])
    parser.add_argument("--sustained", action="store_true")
    options = parser.parse_args()
    what, out, dtype = options.what, options.out, getattr(torch, options.dtype)
    torch.manual_seed(0)
    rows = []
    ceilings(rows)
    for head_dim in options.head_dims:
        for causal in (False, True):
            for length in LENGTHS:
                attention(rows, what, dtype, options.peers, options.sustained, TOKENS // length, HIDDEN // head_dim, length, head_dim, causal)
                torch.cuda.empty_cache()
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], check=True, capture_output=True,
                            text=True).stdout.split()[0]
    columns = ["peer", "what", "dtype", "head_dim", "causal", "seq", "batch", "heads", "ms", "tflops", "gbps", "peak_extra_mb"]
    with open(out + ".part", "w", newline="", encoding="utf-8") as file:
        cudnn = torch.backends.cudnn.version()
        file.write(f"# date {datetime.date.today()}; GPU {torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}, "
                   f"PyTorch {torch.__version__}, cuDNN {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}; "
                   f"command: docs/results/time_peers.py {' '.join([what, 'FILE'] + sys.argv[3:])}\n")
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(out + ".part", out)


main()
