"""The tables of the pages, as functions of their arguments; make_tables.py says which there are."""
import math
import re
import sys
import textwrap
from statistics import geometric_mean

from measured import PEERS, RESULTS, ROOT, TableError, bench_rows, gpu_and_date, peer_rows, rates, read, same_shape

sys.path.insert(0, str(ROOT / "docs"))
import ideas as ideas_page  # noqa: E402

WIDTH = 160  # of a note's lines
TABLES = {}


def table(function):
    TABLES[function.__name__] = function
    return function


# ---- Writing


def number(x, digits=3):
    """Three significant digits, no exponent: 0.765, 34.4, 359, 1,080."""
    if x == 0:
        return "0"
    x = float(f"{x:.{digits}g}")
    decimals = max(0, digits - len(str(int(abs(x)))) if abs(x) >= 1 else digits - 1 - int(f"{x:e}".split("e")[1]))
    return f"{x:,.{decimals}f}"


def bytes_text(x):
    """4 B, 4.19 MB, 17.2 GB, 8.80 TB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if x >= size:
            return f"{number(x / size)} {unit}"
    return f"{x:.0f} B" if x else "0"


def percent(x):
    x = float(x)
    return "< 0.1" if 0 < x < 0.1 else f"{x:.1f}" if x < 10 else f"{x:.0f}"


def markdown(titles, rows, sources, links):
    """A table whose first column is text and the others numbers; `sources` are (file, comments)."""
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    for name, comments in sources:
        note = f"[{name}]({links}{name}): " + "; ".join(comments)
        note = re.sub(r"([*_<|])", r"\\\1", note.replace(f"[{name}]({links}{name})", "\0")).replace("\0", f"[{name}]({links}{name})")
        lines += [""] + textwrap.wrap(f"*{note}*", WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


# ---- The tables


@table
def counters(links, chapter):
    name = f"h200_ncu_{chapter}.csv"
    data, comments = read(name)
    rows = []
    for r in data:
        x = {key: float(value) for key, value in r.items() if key != "kernel"}
        seconds = x["gpu__time_duration.sum"] * 1e-9
        read_bytes, written = x["dram__bytes_read.sum"], x["dram__bytes_write.sum"]

        def per_request(kind):
            requests = x[f"l1tex__t_requests_pipe_lsu_mem_global_op_{kind}.sum"]
            return f"{x[f'l1tex__t_sectors_pipe_lsu_mem_global_op_{kind}.sum'] / requests:.1f}" if requests else "–"

        rows.append([f"`{r['kernel']}`", number(seconds * 1e3), number(read_bytes / 1e9), number(written / 1e9),
                     number((read_bytes + written) / seconds / 1e12)]
                    + [percent(x[f"{unit}__throughput.avg.pct_of_peak_sustained_elapsed"]) for unit in ("dram", "l1tex", "sm")]
                    + [per_request("ld"), per_request("st")])
    titles = ["kernel", "ms", "HBM read, GB", "HBM written, GB", "HBM TB/s", "HBM busy, %", "L1 busy, %", "SM busy, %",
              "sectors a load", "sectors a store"]
    return markdown(titles, rows, [(name, comments)], links)


@table
def counters_compared(links):
    """A row a chapter and counter: how many kernels and shapes were compared, how many agree to 2 %, the rest by name."""
    name = "h200_counters.csv"
    data, comments = read(name)
    groups = {}
    for r in data:
        executor, gpu = float(r["executor"]), float(r["gpu"] or 0)
        group = groups.setdefault((r["step"][:2], r["counter"]), [0, 0, {}])
        whole = gpu
        if r["counter"] == "bank conflicts":  # a share of the wavefronts
            whole = next(float(w["gpu"]) for w in data if w["counter"] == "shared wavefronts"
                         and all(w[key] == r[key] for key in ("step", "shape", "kernel")))
        same = abs(executor - gpu) <= 0.02 * whole
        group[0] += 1
        group[1] += same
        if not same:
            group[2].setdefault(f"{r['step'].split('/')[1]}: `{r['kernel']}`", []).append(f"{executor / gpu:.2f}" if gpu else f"{executor:.0f} to 0")
    rows = []
    for (chapter, counter), (compared, agree, apart) in sorted(groups.items()):
        others = "; ".join(f"{kernel} {', '.join(ratios)}" for kernel, ratios in apart.items())
        rows.append([chapter, counter, str(compared), str(agree), others or "–"])
    titles = ["chapter", "counter", "compared", "agree to 2 %", "the others: executor against GPU"]
    return markdown(titles, rows, [(name, comments)], links)


@table
def speed(links, chapter, what):
    name = f"h200_bench_{chapter}.csv"
    data, comments = read(name)
    data = [r for r in data if r["pass"] == what and r["causal"] == "0"]
    if not data:
        raise TableError(f"docs/results/{name} has no row of pass '{what}'")
    steps = list(dict.fromkeys(r["step"] for r in data))
    dtype, head_dim = data[0]["dtype"], data[0]["head_dim"]
    data = [r for r in data if r["dtype"] == dtype and r["head_dim"] == head_dim]
    peers, sources = peer_rows(dtype, what, chapter)
    shown = [peer for peer in PEERS if any(same_shape(r, p) for r in data for p in peers if p["peer"] == peer)]

    titles = ["N"]
    for step in steps:
        titles += [f"`{step.split('/')[1]}`: ms", "TFLOP/s", "scratch, GB"]
    for peer in shown:
        titles += [f"{PEERS[peer]}: TFLOP/s", "memory, GB"]
    rows = []
    for seq in sorted({int(r["seq"]) for r in data}):
        row = [f"{seq:,}"]
        for step in steps:
            mine = [r for r in data if r["step"] == step and int(r["seq"]) == seq]
            row += [number(float(mine[0]["ms"])), number(float(mine[0]["tflops"])),
                    number(float(mine[0]["scratch_bytes"]) / 1e9)] if mine else ["–"] * 3
        shape = next(r for r in data if int(r["seq"]) == seq)
        for peer in shown:
            mine = [p for p in peers if p["peer"] == peer and same_shape(shape, p)]
            row += [number(float(mine[0]["tflops"])), number(float(mine[0]["peak_extra_mb"]) / 1e3)] if mine else ["–"] * 2
        rows.append(row)
    return markdown(titles, rows, [(name, comments)] + (sources if shown else []), links)


@table
def shapes(links, chapter, what):
    """TFLOP/s by length, for each head dim, with and without a causal mask, in the precision of the file's first row."""
    name = f"h200_bench_{chapter}.csv"
    data, comments = read(name)
    dtype = data[0]["dtype"]
    peers, sources = peer_rows(dtype, what, chapter)
    data = [r for r in data if r["pass"] == what and r["dtype"] == dtype]
    lengths = sorted({int(r["seq"]) for r in data})
    rows = []
    for head_dim, causal in sorted({(int(r["head_dim"]), r["causal"]) for r in data}):
        def mine(rows_of_all):
            return [r for r in rows_of_all if int(r["head_dim"] or 0) == head_dim and r["causal"] == causal]

        by_name = {}
        for r in mine(data):
            by_name.setdefault(f"`{r['step'].split('/')[1]}`", {})[int(r["seq"])] = float(r["tflops"])
        for r in mine(peers):
            by_name.setdefault(PEERS[r["peer"]], {})[int(r["seq"])] = float(r["tflops"])
        for who, tflops in by_name.items():
            rows.append([who, str(head_dim), "causal" if causal == "1" else "full"]
                        + [number(tflops[n]) if n in tflops else "–" for n in lengths])
    titles = ["TFLOP/s", "D", "mask"] + [f"N {n:,}" for n in lengths]
    return markdown(titles, rows, [(name, comments)] + sources, links)


@table
def ratios(links, step, what):
    """How many times as fast as PyTorch's kernels a step is, over the lengths and masks that both were measured at: the
    geometric mean for each head dim, the least and the most."""
    data = [r for r in bench_rows(what) if r["step"] == step]
    if not data:
        raise TableError(f"no h200_bench_*.csv has rows of {step}, pass '{what}'")
    peers, _ = peer_rows(data[0]["dtype"], what, step)
    data = [r for r in data if r["dtype"] == data[0]["dtype"]]
    rows = []
    for peer in PEERS:
        for head_dim in sorted({int(r["head_dim"]) for r in data}):
            pairs = [float(r["tflops"]) / float(p["tflops"]) for r in data for p in peers
                     if p["peer"] == peer and int(r["head_dim"]) == head_dim and same_shape(r, p)]
            if pairs:
                rows.append([PEERS[peer], str(head_dim), f"{geometric_mean(pairs):.2f}", f"{min(pairs):.2f}", f"{max(pairs):.2f}"])
    return markdown([f"`{step.split('/')[1]}` against", "D", "geometric mean", "least", "most"], rows, [], links)


@table
def determinism(links, chapter):
    """TFLOP/s of a chapter's backward pass as fast as it can and deterministic, by length, timed in the same call."""
    names = [f"h200_bench_{chapter}.csv", f"h200_bench_{chapter}_deterministic.csv"]
    files = [read(name) for name in names]
    speeds = [{(int(r["head_dim"]), r["causal"], int(r["seq"])): number(float(r["tflops"])) for r in data} for data, _ in files]
    lengths = sorted({seq for _, _, seq in speeds[0]})
    rows = [[f"D {head_dim}, {'causal' if causal == '1' else 'full'}"]
            + [" / ".join(one.get((head_dim, causal, n), "–") for one in speeds) for n in lengths]
            for head_dim, causal in sorted({key[:2] for key in speeds[0]})]
    titles = ["TFLOP/s, as fast as it can / deterministic"] + [f"N {n:,}" for n in lengths]
    return markdown(titles, rows, [(name, comments) for name, (_, comments) in zip(names, files)], links)


@table
def ideas(links, of=""):
    """h200_ideas.csv: by how many percent a kernel (the step `of`; without it each) is faster than the same without an idea
    (docs/ideas.py).

    Of the fast launches, ms_p10: from some launch on the clock may fall, and where it did is no matter of the idea."""
    name = "h200_ideas.csv"
    data, comments = read(name)
    ms = {(r["step"], r["head_dim"], r["causal"], int(r["seq"])): float(r["ms_p10"]) for r in data}
    data = [r for r in data if r["step"].endswith(of.split("/")[-1])]
    columns = sorted({(int(r["head_dim"]), r["causal"]) for r in data})
    lengths = sorted({int(r["seq"]) for r in data})
    rows = []
    for idea, (base, _) in ideas_page.ideas().items():
        if of and base != of:
            continue
        step, cells = f"30_without_{idea}/{base.split('/')[1]}", []
        if not any(r["step"] == step for r in data):
            raise TableError(f"docs/results/{name} has no row of {step}")
        for head_dim, causal in columns:
            pairs = [(ms.get((base, str(head_dim), causal, n)), ms.get((step, str(head_dim), causal, n))) for n in lengths]
            cells.append(" / ".join(f"{100 * (without / with_it - 1):+.1f}".replace("-", "−") if with_it and without else "–" for with_it, without in pairs))
        rows.append([f"[{idea}](ideas.md#{idea})" if of else f"[{idea}](#{idea}) of `{base}`"] + cells)
    if not rows:
        raise TableError(f"docs/ideas.md takes nothing out of {of}")
    titles = ["%"] + [f"D {head_dim}, {'causal' if causal == '1' else 'full'}" for head_dim, causal in columns]
    return markdown(titles, rows, [(name, comments)], links)


@table
def quantising(links):
    """Quantising Q, K and V, with and without the rotation, against the time of a copy of as many bytes."""
    name = "h200_quantise_08_fp8.csv"
    data, comments = read(name)
    lengths = sorted({int(r["seq"]) for r in data})
    rows = []
    for head_dim in sorted({int(r["head_dim"]) for r in data}):
        for rotation, title in (("1", "rotated"), ("0", "not rotated")):
            us = {int(r["seq"]): float(r["ms"]) * 1e3 for r in data if int(r["head_dim"]) == head_dim and r["rotation"] == rotation}
            rows.append([f"D {head_dim}, {title}"] + [number(us[n]) for n in lengths])
    return markdown(["µs"] + [f"N {n:,}" for n in lengths], rows, [(name, comments)], links)


@table
def accuracy(links):
    """The root mean square errors of `flashsteps accuracy`, a column a head dim, and the paper's."""
    name = "h200_accuracy_08_fp8.csv"
    data, comments = read(name)
    heads = list(dict.fromkeys(r["head_dim"] for r in data))
    rows = []
    for dtype, how in dict.fromkeys((r["dtype"], r["how"]) for r in data):
        rmse = {r["head_dim"]: float(r["rmse"]) for r in data if (r["dtype"], r["how"]) == (dtype, how)}
        rows.append([f"{dtype}, {how}"] + [f"{rmse[h]:.1e}".replace("e-0", "e-") if h in rmse else "–" for h in heads])
    return markdown(["root mean square error"] + [h if h == "paper" else f"D {h}" for h in heads], rows, [(name, comments)], links)


@table
def lse(links):
    """LSE of e4m3 scores on the GPU and on the executor, a column a head dim."""
    name = "h200_lse_08_fp8.csv"
    data, comments = read(name)
    short = lambda x: f"{float(x):.1e}".replace("e-0", "e-")  # noqa: E731
    rows = [["root mean square of the score"] + [number(float(r["score_rms"])) for r in data],
            ["… of its error by rounding Q and K"] + [number(float(r["rounding_rms"])) for r in data],
            ["… of GPU − executor"] + [short(r["difference_rms"]) for r in data],
            ["relative to the score"] + [f"2^{math.log2(float(r['difference_rms']) / float(r['score_rms'])):.1f}".replace("-", "−") for r in data],
            ["largest difference"] + [number(float(r["largest_difference"]), 2) for r in data],
            ["largest score"] + [number(float(r["largest_score"])) for r in data],
            [r"mean of \|executor\| − \|GPU\|"] + [short(r["mean_nearer_to_0"]) for r in data]]
    return markdown([""] + [f"D {r['head_dim']}" for r in data], rows, [(name, comments)], links)


@table
def ladder(links, what, last="99", notes="full"):
    """TFLOP/s of every step, full attention, head dim 64."""
    lengths, rows, sources, base = (1024, 2048, 4096), [], [], {}
    dtypes = []
    for path in sorted(RESULTS.glob("h200_bench_*.csv")):
        if path.name[len("h200_bench_"):][:2] > last:
            continue
        data, comments = read(path.name)
        data = [r for r in data if r["pass"] == what and r["causal"] == "0" and r["head_dim"] == "64" and r["dtype"] == data[0]["dtype"]]
        if path.stem.endswith("_deterministic"):
            data = [r | {"step": r["step"] + " (deterministic)"} for r in data]
        for step, dtype in dict.fromkeys((r["step"], r["dtype"]) for r in data):
            by_length = {int(r["seq"]): r for r in data if (r["step"], r["dtype"]) == (step, dtype)}
            base = base or by_length
            tflops = {n: float(by_length[n]["tflops"]) for n in lengths if n in by_length}
            rows.append([f"`{step}`", dtype] + [number(tflops[n]) if n in tflops else "–" for n in lengths]
                        + [number(tflops[2048] / float(base[2048]["tflops"])) if 2048 in tflops and 2048 in base else "–",
                           bytes_text(float(by_length[4096]["scratch_bytes"])) if 4096 in by_length else "–"])
            if dtype not in dtypes:
                dtypes.append(dtype)
        if data:
            sources.append((path.name, comments))
    for dtype in dtypes:
        peers, peer_sources = peer_rows(dtype, what)
        peers = [p for p in peers if p["causal"] == "0" and p["head_dim"] == "64"]
        for peer in PEERS:
            by_length = {int(p["seq"]): p for p in peers if p["peer"] == peer}
            if by_length:
                rows.append([PEERS[peer], dtype] + [number(float(by_length[n]["tflops"])) if n in by_length else "–" for n in lengths]
                            + [number(float(by_length[2048]["tflops"]) / float(base[2048]["tflops"])) if 2048 in by_length else "–",
                               bytes_text(float(by_length[4096]["peak_extra_mb"]) * 1e6) if 4096 in by_length else "–"])
        sources += [s for s in peer_sources if s not in sources] if peers else []
    titles = ["step", "precision", "N 1k", "2k", "4k: TFLOP/s", "× 02 at 2k", "scratch at 4k"]
    if notes == "short":
        files = ", ".join(f"[{name}]({links}{name})" for name, _ in sources)
        note = textwrap.wrap(f"*{gpu_and_date([name for name, _ in sources])}; with their commands: {files}*", WIDTH, break_long_words=False,
                             break_on_hyphens=False)
        return markdown(titles, rows, [], links) + "\n" + "\n".join(note) + "\n"
    return markdown(titles, rows, sources, links)


@table
def paper_traffic(links):
    """HBM bytes and time, forward and backward, of chapter 02 against 05 + 06, and the ratio."""
    name = "h200_ncu_paper_shape.csv"
    data, comments = read(name)
    totals = {}
    for r in data:
        total = totals.setdefault(r["chapter"].zfill(2)[:2], [0.0, 0.0, 0.0])
        for i, column in enumerate(("dram_read_bytes", "dram_write_bytes", "ns")):
            total[i] += float(r[column])
    shown = [("02, forward and backward", "02"), ("05, forward", "05"), ("06, backward", "06")]
    missing = [chapter for _, chapter in shown if chapter not in totals]
    rows = [(title, totals[chapter]) for title, chapter in shown if chapter in totals]
    if "05" not in missing and "06" not in missing:
        rows.append(("05 + 06", [a + b for a, b in zip(totals["05"], totals["06"])]))
    rows = [(title, (r, w, r + w, ns)) for title, (r, w, ns) in rows]
    cells = [[title] + [number(x / unit) for x, unit in zip(row, (1e9, 1e9, 1e9, 1e6))] for title, row in rows]
    if not missing:
        cells.append(["02 : (05 + 06)"] + [f"{number(a / b)} ×" if b else "–" for a, b in zip(rows[0][1], rows[-1][1])])
    note = f"\n*Not measured yet: chapter {', '.join(missing)}.*\n" if missing else ""
    return markdown(["kernels of chapter", "HBM read, GB", "HBM written, GB", "together, GB", "ms"], cells, [(name, comments)], links) + note


@table
def passes_02(links):
    """The least that chapter 02's forward kernels compute and move at B 4, H 16, N 2,048, D 64."""
    name = "h200_bench_02_naive_gpu.csv"
    flops_rate, copy_rate = rates(read(name)[1])
    B, H, N, D = 4, 16, 2048, 64
    n, small = B * H * N * N, 4 * B * H * N * D  # elements of S; bytes of Q, of K, of V, of O
    kernels = [("`scores`", "2D", "1 write", 2 * D * n, 1, 2), ("`mask`", "0", "1 write", 0, 1, 0),
               ("`softmax`", "7", "3 reads, 1 write", 7 * n, 4, 0), ("`dropout`", "1", "1 read, 1 write", n, 2, 0),
               ("`weighted_sum`", "2D", "1 read", 2 * D * n, 1, 2)]
    kernels.append(("together", "4D + 8", "9", sum(k[3] for k in kernels), sum(k[4] for k in kernels), sum(k[5] for k in kernels)))
    rows = []
    for kernel, per_element, passes, flops, matrices, small_ones in kernels:
        moved = matrices * 4 * n + small_ones * small
        rows.append([kernel, per_element, passes, number(flops / 1e9), number(moved / 1e9), number(flops / moved),
                     number(flops / flops_rate * 1e3), number(moved / copy_rate * 1e3)])
    titles = ["kernel", "FLOPs an element of S", "passes over an N² matrix", "GFLOP", "GB", "FLOP/byte",
              f"ms at {flops_rate / 1e12:.1f} TFLOP/s", f"ms at {copy_rate / 1e12:.2f} TB/s"]
    return markdown(titles, rows, [], links)
