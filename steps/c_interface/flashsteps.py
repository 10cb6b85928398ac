"""The C interface (flashsteps.h) for Python: nothing but ctypes is needed.

    library = Library("build/libflashsteps.so")
    for step in library.steps():
        print(step.id, step.head_dims)
    problem = Problem(batch=1, heads=8, kv_heads=8, seq_q=1000, seq_k=1000, head_dim=64, scale=0.125, causal=1,
                      dtype=BF16)
    library.run("07/pipelined", FORWARD, GPU, problem, dict(q=q.data_ptr(), …, lse=lse.data_ptr()), stream)

Addresses are integers, as PyTorch's data_ptr() and ctypes.addressof() give them. What the functions do, and what memory
they need, stands in flashsteps.h.
"""
import ctypes
from collections import namedtuple

FP64, FP32, FP16, BF16, E4M3 = range(5)
FORWARD, BACKWARD = range(2)
CPU, GPU = range(2)
OK, FAULT, REFUSED = range(3)
INTERFACE = 1  # FLASHSTEPS_INTERFACE of the header that this file follows


class Error(Exception):
    """A call failed; `code` is FAULT or REFUSED."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Problem(ctypes.Structure):
    """flashsteps_problem; what is not given is 0."""

    _fields_ = [(name, ctypes.c_int) for name in ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim")] + [
        ("scale", ctypes.c_double), ("causal", ctypes.c_int), ("dropout", ctypes.c_double), ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint32), ("dtype", ctypes.c_int), ("deterministic", ctypes.c_int)]


class Tensors(ctypes.Structure):
    """flashsteps_tensors; what is not given is NULL."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse", "d_o", "dq", "dk", "dv", "workspace", "saved")]


class _Step(ctypes.Structure):
    _fields_ = [("id", ctypes.c_char_p), ("idea", ctypes.c_char_p),
                ("dtypes", ctypes.POINTER(ctypes.c_int)), ("dtype_count", ctypes.c_int),
                ("head_dims", ctypes.POINTER(ctypes.c_int)), ("head_dim_count", ctypes.c_int)] + [
        (name, ctypes.c_int) for name in ("forward", "backward", "causal", "dropout", "kv_heads", "min_sm", "on_cpu", "on_gpu")] + [
        ("saved_by", ctypes.c_char_p)]


Step = namedtuple("Step", "id idea dtypes head_dims forward backward causal dropout kv_heads min_sm on_cpu on_gpu saved_by")


class Library:
    def __init__(self, path):
        self._library = ctypes.CDLL(path)
        self._library.flashsteps_last_error.restype = ctypes.c_char_p
        if self._library.flashsteps_interface() != INTERFACE:
            raise Error(REFUSED, f"{path}: has interface {self._library.flashsteps_interface()}, this file follows {INTERFACE}")

    def steps(self):
        """All steps, in the order of the course."""
        return [self._step("flashsteps_get_step", index) for index in range(self._library.flashsteps_step_count())]

    def find(self, name):
        """The step that an id or a prefix of it means."""
        return self._step("flashsteps_find_step", name.encode())

    def why_not(self, step, pass_, device, problem):
        """Why a step cannot run, in one line; None if it can."""
        code = self._library.flashsteps_supports(step.encode(), pass_, device, ctypes.byref(problem))
        return None if code == OK else self._last_error()

    def memory_needed(self, step, pass_, device, problem):
        """Bytes of `workspace` and of `saved`."""
        workspace, saved = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("flashsteps_memory_needed", step.encode(), pass_, device, ctypes.byref(problem),
                   ctypes.byref(workspace), ctypes.byref(saved))
        return workspace.value, saved.value

    def run(self, step, pass_, device, problem, addresses, stream=0):
        """One pass of one step; `addresses` by the names of flashsteps_tensors."""
        self._call("flashsteps_run", step.encode(), pass_, device, ctypes.byref(problem),
                   ctypes.byref(Tensors(**addresses)), ctypes.c_void_p(stream))

    def _last_error(self):
        return self._library.flashsteps_last_error().decode()

    def _call(self, function, *arguments):
        code = getattr(self._library, function)(*arguments)
        if code != OK:
            raise Error(code, self._last_error())

    def _step(self, function, which):
        s = _Step()
        self._call(function, which, ctypes.byref(s))
        return Step(s.id.decode(), s.idea.decode(), s.dtypes[:s.dtype_count], s.head_dims[:s.head_dim_count],
                    *(bool(getattr(s, name)) for name in ("forward", "backward", "causal", "dropout", "kv_heads")), s.min_sm,
                    bool(s.on_cpu), bool(s.on_gpu), s.saved_by.decode() if s.saved_by else None)
