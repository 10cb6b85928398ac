"""The plots of docs/figures that are made from the measured data: file name to SVG text."""
from measured import PEERS, RESULTS, bench_rows, ceilings, gpu_and_date, peer_rows, read
from svg import Series, bar_plot, line_plot

PLOTS = {}


def plot(name):
    def enter(function):
        PLOTS[name] = function
        return function
    return enter


# ---- Speed by sequence length


def bounds(what, head_dim, causal, rows):
    """(N, TFLOP/s) of what bounds a kernel, its name, and what it is: as `flashsteps bench` measured it, from the rows that say
    how near to it they came; without such rows matrix products as fast as cuBLAS's, and each tensor moved once by a copy."""
    measured = {int(r["seq"]): float(r["tflops"]) / float(r["bound_fraction"]) for r in rows
                if r["dtype"] == "bf16" and r["bound_fraction"] and float(r["bound_fraction"]) <= 1}
    if measured:
        return list(measured.items()), "bound, bf16", "Bound: the tensor cores' rate, or a copy's, as flashsteps bench measures them"
    flop_rate, copy_rate = ceilings()
    points = {}
    for r in rows:
        B, H, N = int(r["batch"]), int(r["heads"]), int(r["seq"])
        flops = 4 * B * H * N * N * head_dim * (0.5 if causal else 1) * (2.5 if what == "backward" else 1)
        moved = B * H * N * (2 * head_dim * (8 if what == "backward" else 4) + 4)
        points[N] = flops / max(flops / flop_rate, moved / copy_rate) / 1e12
    return list(points.items()), "cuBLAS, or a copy", f"cuBLAS: a product of size 8,192, {flop_rate / 1e12:.0f} TFLOP/s; a copy: {copy_rate / 1e12:.2f} TB/s"


def speed(what, head_dim):
    peers, sources = peer_rows("bf16", what)
    panels, files = [], [name for name, _ in sources]
    for causal, heading in (("0", "full"), ("1", "causal mask")):
        mine = lambda rows: [r for r in rows if r["head_dim"] == str(head_dim) and r["causal"] == causal and r["tflops"]]
        rows = [r for r in mine(bench_rows(what)) if r["dtype"] in ("bf16", "e4m3")]
        series = []
        for chapter, dtype in (("08", "e4m3"), ("08", "bf16"), ("07", "bf16")):
            here = [r for r in rows if r["step"][:2] == chapter and r["dtype"] == dtype]
            if here:  # of a chapter's ladder the rung that is fastest at the longest sequence
                best = max(here, key=lambda r: (int(r["seq"]), float(r["tflops"])))["step"]
                series.append(Series(best.replace("_warp_partitioning", "").replace("_hopper_async", "") + (", e4m3" if dtype == "e4m3" else ""),
                                     [(int(r["seq"]), float(r["tflops"])) for r in here if r["step"] == best]))
        for peer, name in PEERS.items():
            here = [r for r in mine(peers) if r["peer"] == peer]
            if len(here) > 1:
                series.append(Series(name, [(int(r["seq"]), float(r["tflops"])) for r in here]))
        points, name, source = bounds(what, head_dim, causal == "1", rows)
        series.append(Series(name, points, dashed=True))
        panels.append((heading, series))
    foot = [f"{gpu_and_date(files)}; bf16, 16,384 tokens, hidden size 2,048. {source}"]
    return line_plot(f"Attention {what}, head dim {head_dim}", "sequence length", "TFLOP/s", panels, foot=foot)


for _what, _dims in (("forward", (64, 128, 256)), ("backward", (64, 128))):
    for _dim in _dims:
        plot(f"speed_{_what}_{_dim}.svg")(lambda what=_what, dim=_dim: speed(what, dim))


# ---- The ladder


@plot("ladder.svg")
def ladder():
    """TFLOP/s of every step at N 4,096, head dim 64, full, on a logarithmic axis."""
    shape = lambda rows: [r for r in rows if r["head_dim"] == "64" and r["causal"] == "0" and r["seq"] == "4096" and r["tflops"]]
    bars, seen = [], set()
    for r in shape(bench_rows("forward")):
        if r["dtype"] != "fp16" and (r["step"], r["dtype"]) not in seen:
            seen.add((r["step"], r["dtype"]))
            bars.append((f"{r['step']}, {r['dtype']}", float(r["tflops"]), 0 if r["dtype"] == "fp32" else 2 if r["dtype"] == "bf16" else 4))
    for dtype in ("fp32", "bf16"):
        peers = sorted(shape(peer_rows(dtype, "forward")[0]), key=lambda r: list(PEERS).index(r["peer"]))
        bars += [(f"{PEERS[r['peer']]}, {dtype}", float(r["tflops"]), 7) for r in peers]
    names = [path.name for path in RESULTS.glob("h200_bench_*.csv") if "deterministic" not in path.name]
    return bar_plot("The ladder: forward, N 4,096, 32 heads of 64", "TFLOP/s, logarithmic", bars, logarithmic=True, foot=[gpu_and_date(names)])


# ---- Memory


@plot("memory.svg")
def memory():
    """Memory beyond the inputs, forward and backward, of one sequence of 16 heads: quadratic and linear."""
    rows = read("h200_long_sequences.csv")[0]
    names = {"operations": "operation by operation", "flash2": "PyTorch, FlashAttention-2", "07": "07/pipelined + backward",
             "08": "08/overlapped + backward"}
    series = []
    for what, name in names.items():
        mine = [(int(r["seq"]), float(r["peak_bytes"]) / 1e9) for r in rows if r["what"] == what and r["peak_bytes"]]
        out = [r for r in rows if r["what"] == what and r["error"] == "out of memory"]
        if mine:
            series.append(Series(name, mine, ends="out of memory beyond" if out else ""))
    for step, name in (("02_naive_gpu/forward", "02/forward's workspace, fp32"), ("06_recompute_backward/backward", "06/backward's, fp32")):
        mine = [(int(r["seq"]), float(r["peak_bytes"]) / 1e9) for r in rows if r["what"] == f"workspace of {step}"]
        series.append(Series(name, mine, dashed=True))
    foot = [f"{gpu_and_date(['h200_long_sequences.csv'])}; bf16, batch 1, 16 heads of 64, causal. Dashed: not run, what the step asks for"]
    return line_plot("Memory of attention, forward and backward", "sequence length", "GB, logarithmic", [("", series)], logarithmic=True, foot=foot)


# ---- HBM traffic


@plot("hbm_measured.svg")
def hbm_measured():
    """GB of HBM reads and writes at the shape of FlashAttention's Figure 2, by the GPU's counters."""
    totals = {}
    for r in read("h200_ncu_paper_shape.csv")[0]:
        chapter = r["chapter"].zfill(2)
        totals[chapter] = totals.get(chapter, 0) + (float(r["dram_read_bytes"]) + float(r["dram_write_bytes"])) / 1e9
    bars = [("02, forward and backward, fp32", totals["02"], 1), ("05 + 06, forward and backward, fp32", totals["05"] + totals["06"], 0),
            ("paper: standard attention, 16 bits, A100", 40.3, 7), ("paper: FlashAttention, 16 bits, A100", 4.4, 7)]
    return bar_plot("HBM traffic of GPT-2 medium's attention, batch 64, N 1,024", "GB read and written", bars,
                    foot=[f"{gpu_and_date(['h200_ncu_paper_shape.csv'])}; paper: Dao et al. 2022, Figure 2"])


# ---- Training


@plot("training_losses.svg")
def training_losses():
    rows = read("h200_training_losses.csv")[0]
    names = {"operations": "operation by operation", "07": "07/pipelined + backward", "08": "08/overlapped + backward",
             "flash2": "PyTorch, FlashAttention-2"}
    series = [Series(names[key], [(int(r["step"]), float(r[key])) for r in rows]) for key in names if key in rows[0]]
    return line_plot("GPT-2 medium: the loss of the first steps", "step", "cross-entropy", [("", series)], x_logarithmic=False,
                     foot=[f"{gpu_and_date(['h200_training_losses.csv'])}; N 1,024, batch 8, bf16; the lines lie on one another"])
