#!/usr/bin/env python3
"""Every step on this GPU beside PyTorch: on the same tensors, is it as right, and is it as fast?

    python3 tests/peers/compare.py build/libflashsteps.so [STEP...] [--csv FILE] [--errors FILE] [--check-only]

Right: PyTorch's scaled_dot_product_attention in fp64 is the reference. The error of attention operation by operation in
the step's own precision (products accumulated in fp32; P, O, dS and the gradients rounded) is the measure: of O, LSE, dQ,
dK and dV, the Frobenius norm of the error and the largest error of a step may each be at most twice as large, plus two
units of rounding in fp32. That is the course's error rule (reference_cpu/error_rule.h) with PyTorch's numbers; a backward
pass gets the reference's O and LSE, rounded. PyTorch's own kernels are measured in the same way, for comparison. Dropout
is left to `flashsteps check`, since PyTorch draws other masks.

Fast: step and PyTorch's kernels take turns, launch by launch; medians of single launches.

Exit code 0: all right; 1: a step is not; 2: cannot be run. Needs PyTorch with CUDA.
"""
import argparse
import csv
import statistics
import sys
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashsteps_torch import NAMES, TYPES, Steps, fs, measured_on

# Of the tensors of each precision; a step in e4m3 makes its 8-bit numbers itself.
TENSORS = {number: dtype for dtype, number in TYPES.items()} | {fs.E4M3: torch.bfloat16}
PEERS = {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
         "math": SDPBackend.MATH}
# batch, query heads, key/value heads, query length, key length, causal
SHAPES = [(2, 3, 3, 64, 64, False), (1, 2, 2, 1000, 1000, True), (2, 2, 2, 257, 129, False), (1, 4, 4, 65, 300, True),
          (2, 4, 2, 200, 200, True), (1, 2, 2, 1, 77, False)]
COLUMNS = ("step,dtype,head_dim,causal,seq,batch,heads,pass,ms,tflops,peer,peer_ms,peer_tflops,speed_of_peer").split(",")


# ---- Right


def visible(Nq, Nk, causal, device):
    seen = torch.ones(Nq, Nk, dtype=torch.bool, device=device)
    return seen.tril(Nk - Nq) if causal else seen


def scores(q, k, seen, scale):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)


def reference(q, k, v, d_o, seen, scale):
    """O, LSE, dQ, dK, dV in fp64 by PyTorch."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    with sdpa_kernel([SDPBackend.MATH]):
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    lse = scores(q, k, seen, scale).logsumexp(-1)
    return (o, lse, *torch.autograd.grad(o, (q, k, v), d_o.double()))


def in_eight_bits(x, largest):
    """x as multiples of `largest` / 448 in e4m3."""
    return (x * (448 / largest)).to(torch.float8_e4m3fn).float() * (largest / 448)


def unfused(q, k, v, d_o, seen, scale, precision):
    """The same operation by operation in this precision. In e4m3 Q, K and V have one scale each, which is the plainest way;
    P, whose eight bits are too few for weights of 1/N, one for each row."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    store = lambda x: x.to(dtype).float()
    q, k, v, d_o = (t.float() for t in (q, k, v, d_o))
    if precision == fs.E4M3:
        q, k, v = (in_eight_bits(t, t.abs().max()) for t in (q, k, v))
    s = scores(q, k, seen, scale)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    p = s.softmax(-1)
    p = in_eight_bits(p, p.amax(-1, keepdim=True)) if precision == fs.E4M3 else store(p)
    o = store(p @ v)
    d_s = store(p * (d_o @ v.transpose(-1, -2) - (d_o * o).sum(-1, keepdim=True)))
    of_group = lambda x: x.unflatten(1, (-1, group)).sum(2)
    gradients = scale * (d_s @ k), of_group(scale * (d_s.transpose(-1, -2) @ q)), of_group(p.transpose(-1, -2) @ d_o)
    return (o.to(dtype), s.logsumexp(-1), *(g.to(dtype) for g in gradients))


def rounding(q, k, v, d_o, seen, scale):
    """How far one unit of rounding in every operation moves each element of O, LSE, dQ, dK, dV: a sum of n products is off
    by about sqrt(n / 2) units of the root of its squared products, and a product by what its factors are off."""
    group = q.shape[1] // k.shape[1]
    q, k, v, d_o = (t.double() for t in (q, k, v, d_o))
    s = scores(q, k, seen, scale)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    p, lse = s.softmax(-1), s.logsumexp(-1, keepdim=True)
    sums = lambda n: 1 + n / 2
    s_noise2 = sums(q.shape[-1]) * (scale * scale * (q * q) @ (k * k).transpose(-1, -2)) + lse * lse
    d_p = (d_o @ v.transpose(-1, -2)).abs() + (d_o * (p @ v)).sum(-1, keepdim=True).abs()  # of what dS is a difference
    of_queries, of_keys = s_noise2 + sums(k.shape[2]), s_noise2 + sums(group * q.shape[2])
    of_group = lambda x: x.unflatten(1, (-1, group)).sum(2)
    squares = ((p * p * of_queries) @ (v * v), 1 + 2 * lse.squeeze(-1) ** 2 + (p * p * s_noise2).sum(-1),
               scale * scale * ((p * d_p) ** 2 * of_queries) @ (k * k),
               of_group(scale * scale * ((p * d_p) ** 2 * of_keys).transpose(-1, -2) @ (q * q)),
               of_group((p * p * of_keys).transpose(-1, -2) @ (d_o * d_o)))
    return [x.sqrt() for x in squares]


class Case:
    """A problem with its tensors, and what is right for it."""

    def __init__(self, shape, D, precision, generator):
        B, Hq, Hkv, Nq, Nk, self.causal = shape
        self.precision = precision
        draw = lambda heads, rows: torch.randn(B, heads, rows, D, device="cuda", generator=generator).to(TENSORS[precision])
        self.q, self.k, self.v, self.d_o = draw(Hq, Nq), draw(Hkv, Nk), draw(Hkv, Nk), draw(Hq, Nq)
        self.name = f"B {B}, heads {Hq}/{Hkv}, {Nq} x {Nk}, D {D}{', causal' if self.causal else ''}"
        tensors = self.q, self.k, self.v, self.d_o, visible(Nq, Nk, self.causal, "cuda"), D ** -0.5
        self.expected, self.baseline, self.noise = reference(*tensors), unfused(*tensors, precision), rounding(*tensors)

    def judge(self, results):
        """Lines that say what is wrong with results by name, and the largest ratio of an error to what is allowed."""
        wrong, worst = [], 0.0
        for name, expect, base, unit in zip(("O", "LSE", "dQ", "dK", "dV"), self.expected, self.baseline, self.noise):
            if name not in results:
                continue
            error, base_error = (x.double() - expect for x in (results[name], base))
            for kind, size in (("norm of the", torch.norm), ("largest", lambda x: x.abs().max())):
                mine, limit = size(error).item(), 2 * size(base_error).item() + 2 * 2.0 ** -24 * size(unit).item()
                worst = mine / limit if not mine / limit <= worst else worst  # a NaN is taken, and stays
                if not mine <= limit:
                    wrong.append(f"{name}: {kind} error {mine:.2e}, allowed {limit:.2e} at {self.name}")
        return wrong, worst


def results_of_step(steps, step, case):
    """O and LSE, dQ, dK and dV, as far as the step has the pass and supports the case."""
    q, k, v, d_o = case.q, case.k, case.v, case.d_o
    options = dict(causal=case.causal, dtype=case.precision)
    problem = steps.problem(q, k, **options)
    can = lambda pass_: not steps.library.why_not(step.id, pass_, fs.GPU, problem)
    results = {}
    if step.forward and can(fs.FORWARD):
        results.update(zip(("O", "LSE"), steps.forward(step.id, q, k, v, **options)))
    if step.backward and can(fs.BACKWARD):  # from the chapter's own forward pass where it saves something
        o, lse, saved = case.expected[0].detach().to(q.dtype), case.expected[1].float(), None
        if step.saved_by:
            o, lse, saved = steps.forward(step.saved_by, q, k, v, **options)
        results.update(zip(("dQ", "dK", "dV"), steps.backward(step.id, q, k, v, o, lse, d_o, saved, **options)))
    torch.cuda.synchronize()
    return results


def results_of_peer(peer, case):
    """O, dQ, dK and dV of PyTorch's kernel; nothing where it does not take the case (its causal mask is aligned top left)."""
    if case.causal and case.q.shape[2] != case.k.shape[2]:
        return {}
    q, k, v = (t.clone().requires_grad_() for t in (case.q, case.k, case.v))
    try:
        with sdpa_kernel([PEERS[peer]]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            o = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=q.shape[1] != k.shape[1])
            return dict(zip(("O", "dQ", "dK", "dV"), (o.detach(), *torch.autograd.grad(o, (q, k, v), case.d_o))))
    except RuntimeError:
        return {}


def check(results_of, precision, head_dims):
    """Judges all cases: what is wrong, the largest ratio of an error to what is allowed, how many cases there were."""
    generator = torch.Generator("cuda").manual_seed(8)
    wrong, worst, cases = [], 0.0, 0
    for D in head_dims:
        for shape in SHAPES:
            case = Case(shape, D, precision, generator)
            if results := results_of(case):
                found, ratio = case.judge(results)
                wrong += found
                worst, cases = ratio if not ratio <= worst else worst, cases + 1
    return wrong, worst, cases


# ---- Fast


def in_turn(calls, rounds=11, warm_up=2):
    """Median milliseconds of each call, when they take turns."""
    times = {name: [] for name in calls}
    for i in range(warm_up + rounds):
        for name, call in calls.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(1_000_000)  # about half a millisecond, in which the host gets ahead of the GPU
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if i >= warm_up:
                times[name].append(start.elapsed_time(stop))
    return {name: statistics.median(ms) for name, ms in times.items()}


def peer_call(peer, pass_, q, k, v, d_o, causal):
    """A call of PyTorch's kernel; None where it does not support this."""
    try:
        with sdpa_kernel([PEERS[peer]]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch tells at length why a kernel was not used
            forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            if pass_ == fs.FORWARD:
                def call():
                    with sdpa_kernel([PEERS[peer]]), torch.no_grad():
                        forward()
            else:
                o = forward()
                call = lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)
            call()
        torch.cuda.synchronize()
        return call
    except RuntimeError:
        return None


def time_step(steps, step, precision, D, N, tokens, causal):
    """Rows of COLUMNS, one a peer."""
    B, H = tokens // N, 2048 // D
    draw = lambda: torch.randn(B, H, N, D, device="cuda").to(TENSORS[precision])
    q, k, v, d_o = draw(), draw(), draw(), draw()
    options = dict(causal=causal, dtype=precision)
    rows = []
    for pass_, name in ((fs.FORWARD, "forward"), (fs.BACKWARD, "backward")):
        problem = steps.problem(q, k, **options)
        if not getattr(step, name) or steps.library.why_not(step.id, pass_, fs.GPU, problem):
            continue
        if pass_ == fs.FORWARD:
            calls = {step.id: lambda: steps.forward(step.id, q, k, v, **options)}
        else:
            o, lse, saved = d_o, torch.full((B, H, N), 1.0, device="cuda"), None
            if step.saved_by:
                o, lse, saved = steps.forward(step.saved_by, q, k, v, **options)
            calls = {step.id: lambda: steps.backward(step.id, q, k, v, o, lse, d_o, saved, **options)}
        grad = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        for peer in PEERS:  # PyTorch has none in e4m3: its kernels for the same tensors
            too_slow = peer == "math" and precision != fs.FP32
            if not too_slow and (call := peer_call(peer, pass_, *grad, d_o, causal)):
                calls[peer] = call
        ms = in_turn(calls)
        flops = 4 * B * H * N * N * D * (0.5 if causal else 1) * (2.5 if pass_ == fs.BACKWARD else 1)
        mine = ms.pop(step.id)
        for peer, peer_ms in ms.items() or [("", None)]:
            rows.append((step.id, NAMES[precision], D, int(causal), N, B, H, name, f"{mine:.6g}", f"{flops / mine / 1e9:.4g}", peer,
                         f"{peer_ms:.6g}" if peer_ms else "", f"{flops / peer_ms / 1e9:.4g}" if peer_ms else "",
                         f"{peer_ms / mine:.4g}" if peer_ms else ""))
    return rows


def means(prefix, name):
    """Whether "05", "08/ping" or "07_warp/back" means this id, as on the command line of flashsteps."""
    return all(part.startswith(begin) for part, begin in zip(name.split("/"), prefix.split("/")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("steps", nargs="*", help="ids or prefixes; none: all that run on this GPU")
    parser.add_argument("--csv", help="write the timings to this file")
    parser.add_argument("--errors", help="write how near each came to the error allowed to this file")
    parser.add_argument("--check-only", action="store_true", help="no timing")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(print("compare.py: PyTorch sees no GPU here", file=sys.stderr) or 2)
    try:
        steps = Steps(options.library)
    except (OSError, fs.Error) as error:
        sys.exit(print(f"compare.py: {error}", file=sys.stderr) or 2)
    chosen = [s for s in steps.gpu_steps() if not options.steps or any(means(prefix, s.id) for prefix in options.steps)]
    if not chosen:
        sys.exit(print("compare.py: no such step in this library for this GPU", file=sys.stderr) or 2)
    print(measured_on())

    failed, rows, judged = 0, [], []
    for step in chosen:
        for precision in step.dtypes:
            head_dims = [D for D in (64, 128, 256) if D in step.head_dims]
            wrong, worst, cases = check(lambda case: results_of_step(steps, step, case), precision, head_dims)
            good = not wrong and cases > 0
            failed += not good
            judged.append((step.id, NAMES[precision], cases, f"{worst:.2f}"))
            print(f"{'ok  ' if good else 'FAIL'} {step.id}, {NAMES[precision]}: {cases} cases, at most {worst:.2f} of the error allowed",
                  flush=True)
            for line in wrong[:5]:
                print("     " + line)
    for peer, precision in (("flash2", fs.BF16), ("cudnn", fs.BF16), ("efficient", fs.FP32)):
        _, worst, cases = check(lambda case: results_of_peer(peer, case), precision, (64, 128))
        judged.append((f"PyTorch's {peer}", NAMES[precision], cases, f"{worst:.2f}"))
        print(f"     PyTorch's {peer}, {NAMES[precision]}, by the same measure: {cases} cases, at most {worst:.2f} of the error allowed")
    if not options.check_only:
        print("\n" + "  ".join(COLUMNS))
        for step in chosen:
            precision = step.dtypes[-1]
            fp32 = precision == fs.FP32
            for D in (64,) if fp32 else (64, 128):
                for causal in (False, True):
                    for row in time_step(steps, step, precision, D, 1024 if fp32 else 4096, 4096 if fp32 else 16384, causal):
                        rows.append(row)
                        print("  ".join(map(str, row)), flush=True)
    for path, option, table in ((options.csv, "--csv", [COLUMNS, *rows]),
                                (options.errors, "--errors", [("step", "dtype", "cases", "error_over_allowed"), *judged])):
        if path:
            with open(path, "w", newline="", encoding="utf-8") as file:
                print(f"{measured_on()}; command: tests/peers/compare.py build/libflashsteps.so {option} FILE", file=file)
                csv.writer(file, lineterminator="\n").writerows(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
