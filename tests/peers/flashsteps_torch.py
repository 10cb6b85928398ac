"""The steps on PyTorch tensors: one pass at a time, and as an attention that autograd can differentiate.

    steps = Steps("build/libflashsteps.so")
    o, lse, saved = steps.forward("07/pipelined", q, k, v, causal=True)
    o = steps.attention(q, k, v, forward="07/pipelined", backward="07/backward", causal=True)

Tensors are [batch, heads, length, head dim] on the GPU, and contiguous.
"""
import datetime
import functools
import math
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "steps" / "c_interface"))
import flashsteps as fs

TYPES = {torch.float64: fs.FP64, torch.float32: fs.FP32, torch.float16: fs.FP16, torch.bfloat16: fs.BF16}
NAMES = {fs.FP64: "fp64", fs.FP32: "fp32", fs.FP16: "fp16", fs.BF16: "bf16", fs.E4M3: "e4m3"}


def measured_on():
    """When and on what, for the head of a file of measurements."""
    try:
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True,
                                check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return (f"# date {datetime.date.today()}; GPU {torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}, "
            f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")


class Steps:
    def __init__(self, path):
        self.library = fs.Library(path)
        self._needed = functools.lru_cache(maxsize=None)(
            lambda step, pass_, key: self.library.memory_needed(step, pass_, fs.GPU, fs.Problem(*key)))

    def gpu_steps(self):
        """The steps that this build has for the GPU at hand."""
        major, minor = torch.cuda.get_device_capability()
        return [s for s in self.library.steps() if s.on_gpu and s.min_sm <= 10 * major + minor]

    @staticmethod
    def problem(q, k, causal=False, scale=None, dropout=0.0, seed=0, deterministic=False, dtype=None):
        """dtype: E4M3 for a step that makes 8-bit numbers of bf16 tensors; else the tensors' own."""
        B, Hq, Nq, D = q.shape
        return fs.Problem(B, Hq, k.shape[1], Nq, k.shape[2], D, 1 / math.sqrt(D) if scale is None else scale, causal,
                          dropout, seed, 0, TYPES[q.dtype] if dtype is None else dtype, deterministic)

    def memory_needed(self, step, pass_, problem):
        return self._needed(step, pass_, tuple(getattr(problem, name) for name, _ in fs.Problem._fields_))

    def _run(self, step, pass_, problem, tensors, saved):
        for name, t in tensors.items():
            if not t.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
        workspace_bytes, saved_bytes = self.memory_needed(step, pass_, problem)
        device = tensors["q"].device
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        if saved is None:
            saved = torch.empty(saved_bytes, dtype=torch.uint8, device=device)
        addresses = {name: t.data_ptr() for name, t in tensors.items()}
        addresses.update(workspace=workspace.data_ptr(), saved=saved.data_ptr())
        self.library.run(step, pass_, fs.GPU, problem, addresses, torch.cuda.current_stream(device).cuda_stream)
        return saved

    def forward(self, step, q, k, v, **options):
        """O, LSE, and what a backward pass of the same chapter may want of it."""
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        saved = self._run(step, fs.FORWARD, self.problem(q, k, **options), dict(q=q, k=k, v=v, o=o, lse=lse), None)
        return o, lse, saved

    def backward(self, step, q, k, v, o, lse, d_o, saved=None, **options):
        """dQ, dK, dV."""
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = dict(q=q, k=k, v=v, o=o, lse=lse, d_o=d_o, dq=dq, dk=dk, dv=dv)
        self._run(step, fs.BACKWARD, self.problem(q, k, **options), tensors, saved)
        return dq, dk, dv

    def attention(self, q, k, v, forward, backward, **options):
        """O, as a function that autograd knows the gradient of."""
        return _Attention.apply(q.contiguous(), k.contiguous(), v.contiguous(), self, forward, backward, options)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(context, q, k, v, steps, forward, backward, options):
        o, lse, saved = steps.forward(forward, q, k, v, **options)
        context.save_for_backward(q, k, v, o, lse, saved)
        context.call = steps, backward, options
        return o

    @staticmethod
    def backward(context, d_o):
        steps, backward, options = context.call
        q, k, v, o, lse, saved = context.saved_tensors
        return *steps.backward(backward, q, k, v, o, lse, d_o.contiguous(), saved, **options), None, None, None, None
