"""The tables of docs/claims.md: what the papers say, what was measured here."""
import re

from measured import PEERS, RESULTS, TableError, bench_rows, read
from tables import bytes_text, markdown, number, table

WHO = {"operations": "operation by operation", "flash2": PEERS["flash2"], "07": "`07_warp_partitioning/pipelined` and `backward`",
       "08": "`08_hopper_async/overlapped` and `backward`"}


@table
def training(links):
    """h200_training.csv: a row an attention and length: a training step's time and memory, beside operation by operation."""
    data, comments = read("h200_training.csv")
    rows = []
    for r in data:
        base = next(b for b in data if b["attention"] == "operations" and (b["seq"], b["dropout"]) == (r["seq"], r["dropout"]))
        ratio = lambda column: number(float(base[column]) / float(r[column]), 2) + " ×" if base[column] and r[column] else "–"
        cells = [number(float(r["ms_per_step"])), ratio("ms_per_step"), number(float(r["attention_ms_per_step"])), ratio("attention_ms_per_step"),
                 number(float(r["peak_bytes"]) / 1e9)] if r["ms_per_step"] else [r["error"]] + ["–"] * 4
        rows.append([WHO[r["attention"]], f"{int(r['seq']):,}", r["batch"], f"{float(r['dropout']):g}"] + cells)
    titles = ["attention", "N", "batch", "dropout", "step, ms", "faster", "attention in it, ms", "faster", "peak memory, GB"]
    return markdown(titles, rows, [("h200_training.csv", comments)], links)


@table
def losses(links):
    """h200_training_losses.csv: some of the losses, and the largest difference from operation by operation."""
    data, comments = read("h200_training_losses.csv")
    names = [name for name in WHO if name in data[0]]
    rows = [[WHO[name]] + [f"{float(r[name]):.4f}" for r in data if int(r["step"]) == 1 or int(r["step"]) % 10 == 0] for name in names]
    for row, name in zip(rows, names):
        apart = [abs(float(r[name]) / float(r["operations"]) - 1) for r in data]
        worst = max(range(len(apart)), key=apart.__getitem__)
        row += [f"{100 * sorted(apart)[len(apart) // 2]:.3f} %", f"{100 * apart[worst]:.2f} %, step {data[worst]['step']}"] if name != "operations" else ["–"] * 2
    titles = ["loss at step"] + [r["step"] for r in data if int(r["step"]) == 1 or int(r["step"]) % 10 == 0] + ["apart, median", "apart, at most"]
    return markdown(titles, rows, [("h200_training_losses.csv", comments)], links)


@table
def long_sequences(links):
    """h200_long_sequences.csv: time and memory by length, a column pair a kernel, and the workspace of chapter 02."""
    data, comments = read("h200_long_sequences.csv")
    names = [name for name in WHO if any(r["what"] == name for r in data)]
    rows = []
    for seq in sorted({int(r["seq"]) for r in data}):
        row = [f"{seq:,}"]
        for name in names:
            r = next(r for r in data if r["what"] == name and int(r["seq"]) == seq)
            row += [number(float(r["ms"])), bytes_text(float(r["peak_bytes"]))] if r["ms"] else [r["error"], "–"]
        step02 = next(r for r in data if r["what"] == "workspace of 02_naive_gpu/forward" and int(r["seq"]) == seq)
        rows.append(row + [bytes_text(float(step02["peak_bytes"]))])
    titles = ["N"] + [title for name in names for title in (f"{WHO[name]}: ms", "memory")] + ["`02_naive_gpu/forward` would ask for"]
    return markdown(titles, rows, [("h200_long_sequences.csv", comments)], links)


@table
def workspaces(links):
    """What each step of the forward pass asks for beyond its tensors, at three lengths, and how it grows."""
    data, comments = read("h200_long_sequences.csv")
    lengths = (1024, 4096, 16384)
    rows = []
    for what in dict.fromkeys(r["what"] for r in data if r["what"].startswith("workspace of ")):
        sizes = [next(float(r["peak_bytes"]) for r in data if r["what"] == what and int(r["seq"]) == n) for n in lengths]
        power = {16: "N²", 4: "N", 1: "constant"}.get(round(sizes[2] / sizes[1]), "") if sizes[1] else "none"
        rows.append([f"`{what.removeprefix('workspace of ')}`"] + [bytes_text(size) for size in sizes] + [power])
    return markdown(["workspace of"] + [f"N {n:,}" for n in lengths] + ["grows as"], rows, [("h200_long_sequences.csv", comments)], links)


@table
def partitions(links):
    """The steps of chapter 07 at N 4,096: FlashAttention-1's division of a tile among warps against FlashAttention-2's."""
    rows, files = [], []
    shape = lambda r, D, causal: (r["seq"], r["dtype"], r["head_dim"], r["causal"]) == ("4096", "bf16", D, causal)
    mine = [r for r in bench_rows("forward") if r["step"].startswith("07_")]
    columns = [(D, causal) for D in ("64", "128") for causal in ("0", "1")]
    speed = lambda step, D, causal: next((float(r["tflops"]) for r in mine if r["step"] == step and shape(r, D, causal)), None)
    steps = list(dict.fromkeys(r["step"] for r in mine if r["seq"] == "4096"))
    for step in steps:
        cells = []
        for D, causal in columns:
            x, base = speed(step, D, causal), speed(steps[0], D, causal)
            cells.append(f"{number(x)} ({number(x / base, 2)} ×)" if x and base else "–")
        rows.append([f"`{step.split('/')[1]}`"] + cells)
    titles = ["TFLOP/s, bf16"] + [f"D {D}, {'causal' if causal == '1' else 'full'}" for D, causal in columns]
    return markdown(titles, rows, [("h200_bench_07_warp_partitioning.csv", read("h200_bench_07_warp_partitioning.csv")[1])], links)


@table
def ablation(links):
    """h200_ablation_08.csv beside Table 2 of FlashAttention-3."""
    paper = {"08_hopper_async/pingpong": "582: no overlap inside a warpgroup", "08_hopper_async/overlapped": "661: both overlaps"}
    data, comments = read("h200_ablation_08.csv")
    dtypes = [dtype for dtype in ("fp16", "bf16") if any(r["dtype"] == dtype for r in data)]
    rows = []
    for step in dict.fromkeys(r["step"] for r in data if r["step"].startswith("08_")):
        cells = []
        for dtype in dtypes:
            mine = [float(r["tflops"]) for r in data if r["step"] == step and r["dtype"] == dtype]
            cells.append(" / ".join(number(x) for x in mine) if mine else "–")
        rows.append([f"`{step.split('/')[1]}`"] + cells + [paper.get(step, "–")])
    return markdown(["TFLOP/s"] + dtypes + ["paper, fp16, H100"], rows, [("h200_ablation_08.csv", comments)], links)


@table
def beside_pytorch(links, *prefixes):
    """h200_compare_pytorch.csv: the named steps in turn with PyTorch's kernels: TFLOP/s, and how many times as fast."""
    data, comments = read("h200_compare_pytorch.csv")
    data = [r for r in data if not prefixes or r["step"].startswith(prefixes)]
    peers = [peer for peer in PEERS if any(r["peer"] == peer for r in data)]
    groups = {}
    for r in data:
        key = (r["step"], r["dtype"], r["head_dim"], r["causal"], r["seq"], r["pass"], r["tflops"])
        groups.setdefault(key, {})[r["peer"]] = r
    rows = []
    for (step, dtype, D, causal, seq, what, tflops), mine in groups.items():
        cells = [f"{number(float(mine[p]['peer_tflops']))} ({number(float(mine[p]['speed_of_peer']), 2)} ×)" if p in mine else "–" for p in peers]
        rows.append([f"`{step}`", dtype, D, "causal" if causal == "1" else "full", f"{int(seq):,}", number(float(tflops))] + cells)
    titles = ["TFLOP/s", "type", "D", "mask", "N", "here"] + [PEERS[peer] for peer in peers]
    return markdown(titles, rows, [("h200_compare_pytorch.csv", comments)], links)


PEAK_BF16, PEAK_FP8 = 989e12, 1979e12  # NVIDIA's datasheet of the H100 and H200 SXM, dense


@table
def peaks(links):
    """The most that chapter 08 reaches in each pass and precision, in the protocol's shapes, against the datasheet's peak."""
    rows, names = [], []
    for what in ("forward", "backward"):
        for dtype in ("bf16", "fp16", "e4m3"):
            mine = [r for r in bench_rows(what) if r["step"].startswith("08_") and r["dtype"] == dtype and r["tflops"]]
            if mine:
                r = max(mine, key=lambda r: float(r["tflops"]))
                share = float(r["tflops"]) * 1e12 / (PEAK_FP8 if dtype == "e4m3" else PEAK_BF16)
                shape = f"N {int(r['seq']):,}, D {r['head_dim']}, {'causal' if r['causal'] == '1' else 'full'}"
                rows.append([f"`{r['step']}`, {what}, {dtype}", shape, number(float(r["tflops"])), f"{100 * share:.0f} %"])
    for path in sorted(RESULTS.glob("h200_bench_08_*.csv")):
        if "deterministic" not in path.name:
            names.append((path.name, read(path.name)[1]))
    return markdown(["fastest", "shape", "TFLOP/s", "of the peak"], rows, names, links)


@table
def as_measured(links, name, *columns):
    """A CSV file as it stands, or the named columns of it; a note while it is not there."""
    if not re.fullmatch(r"[\w.]+\.csv", name):
        raise TableError(f"'{name}' is no name of a CSV file")
    if not (RESULTS / name).is_file():
        return f"*Not measured yet: there is no {name}.*\n"
    data, comments = read(name)
    columns = columns or list(data[0])

    def cell(text):
        try:
            return number(float(text)) if not text.lstrip("-").isdigit() else f"{int(text):,}"
        except ValueError:
            return f"`{text}`" if "/" in text else text or "–"

    return markdown(list(columns), [[cell(r[c]) for c in columns] for r in data], [(name, comments)], links)
