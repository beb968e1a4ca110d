"""Native: a decode step's operations, compiled if there is a C compiler; its matrix products too
where these are quicker than oneDNN's.

native.c is compiled when an engine is made on a CPU, in about a second, and stored in the user's
cache folder (or, without a home, in a private temporary one), under a name made from the source,
the compiler and the processor, of which TRIREME_NATIVE may name another one (x86-64-v3; on ARM
neoverse-n1). It computes with torch's threads where the compiler's OpenMP is torch's, as gcc's is
on Linux, and elsewhere with one. Without a compiler, or with TRIREME_NATIVE=0, torch's own
operators do the same (`PlainOps` of lean.py). Results differ in the last bits, so that byte-equal
runs need the same choice.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trireme.engines.spin import openmp
from trireme.engines.torch.linear import is_quicker, multiply, pack, packs, widens
from trireme.engines.torch.rows import RowStore
from trireme.ext.fast_engine.where import Where
from trireme.log import get_logger

logger = get_logger("engine")

SOURCE = Path(__file__).with_name("native.c")
SHARED = SOURCE.with_name("products.h")
"""What compiled parts of other extensions may include."""
FLAGS = ["-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-signed-zeros", "-fassociative-math"]
"""Sums may be reordered when compiled; the order is then the same in every run."""
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "add_norm": [_POINTER] * 4 + [_INT] * 2 + [_FLOAT],
    "rotate": [_POINTER] * 5 + [_INT] * 3 + [_FLOAT],
    "silu_times": [_POINTER] * 3 + [_INT],
    "attend": [_POINTER] * 5,
    "log_probabilities": [_POINTER] + [_INT] * 3,
    "inverse_cdf": [_POINTER] * 3 + [_INT] * 3,
    "product": [_POINTER] * 3 + [_INT] * 2,
    "panel_width": [],
}
_OF_FLOAT32 = {
    "decode_step": [_POINTER],
    "decode_steps": [_POINTER] * 2,
}
OF_AVX2 = 16
"""The width of a panel where this processor has AVX2 and no AVX-512, or is held to it."""
PackedProduct = Callable[[Tensor], Tensor]
"""Multiplies x [T, K]: [T, N], without gradients."""


class Work(ctypes.Structure):
    """`Work` of native.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values", "prompt_keys", "prompt_values")),
        *((name, _POINTER) for name in ("lengths", "slots", "shared")),
        *((name, _INT) for name in ("room", "prompt_room", "B", "H", "K", "D", "threads")),
        ("scale", _FLOAT),
    )


class Matrix(ctypes.Structure):
    """`Matrix` of native.c."""

    _fields_ = (("packed", _POINTER), ("bias", _POINTER), ("inputs", _INT), ("outputs", _INT))


def packed_product(weight: Tensor, bias: Tensor | None) -> PackedProduct | None:
    """Return oneDNN's product by a packed copy of a weight; None if nothing is gained."""
    copy = pack(weight)
    return None if copy is None else lambda x: multiply(x, copy, bias)


class Panels:
    """A product by a weight [N, K] whose transpose is copied in panels of a few columns each."""

    def __init__(self, ops: NativeOps, weight: Tensor, bias: Tensor | None) -> None:
        width, rows = ops.panel_width, len(weight)
        whole = weight if rows % width == 0 else F.pad(weight, (0, 0, 0, -rows % width))
        self._ops, self._bias = ops, bias
        self._copy = whole.unflatten(0, (-1, width)).transpose(1, 2).contiguous()
        pointer = None if bias is None else bias.data_ptr()
        self.matrix = Matrix(self._copy.data_ptr(), pointer, weight.shape[1], weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, K]: [T, N]. Each row has the same bits whatever the others are."""
        x, matrix = x.contiguous(), self.matrix
        out = x.new_empty(len(x), matrix.outputs)
        self._ops.invoke(
            "product", ctypes.addressof(matrix), x.data_ptr(), out.data_ptr(), len(x),
            torch.get_num_threads(),
        )  # fmt: skip
        return out


class NativeOps:
    """PlainOps compiled from native.c. `x` of `add_norm` and of `rotate` is overwritten."""

    name = "compiled operators"

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises OSError if it cannot be compiled or loaded."""
        if dtype == torch.bfloat16:
            self._library = load(SOURCE, _SIGNATURES, "-DBF16")
        else:
            self._library = load(SOURCE, _SIGNATURES | _OF_FLOAT32)
        self.panel_width: int = self._library.panel_width()
        self._dtype = dtype

    @property
    def multiplies(self) -> bool:
        """Return whether products by packed weights are compiled ones. With AVX2, and on Intel's
        processors with AVX-512, these take half (16 rows) to 0.85 (64 rows) of the time of
        oneDNN's; on AMD's with AVX-512 oneDNN's were quicker. In bfloat16 they are where oneDNN has
        none.
        """
        if self._dtype == torch.bfloat16:
            return self.panel_width == OF_AVX2 and widens()
        ours = self.panel_width == OF_AVX2 or not is_quicker()
        return ours and packs(torch.float32)

    def packed(self, weight: Tensor, bias: Tensor | None) -> PackedProduct | None:
        """Return the product by a packed copy of a weight; None where none is quicker."""
        return Panels(self, weight, bias) if self.multiplies else packed_product(weight, bias)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `x` in place, and return its RMS norm times `weight`."""
        out = torch.empty_like(x, dtype=weight.dtype)
        more = None if delta is None else delta.data_ptr()
        rows, width = x.shape
        self.invoke(
            "add_norm", x.data_ptr(), more, weight.data_ptr(), out.data_ptr(), rows, width, eps
        )
        return out

    def rotate(
        self, x: Tensor, weight: Tensor | None, tables: list[Tensor], positions: Tensor, eps: float
    ) -> Tensor:
        """Rotate queries or keys in place by their positions, after a norm where there is a
        `weight`.
        """
        cosines, sines = tables[:2]
        scale = None if weight is None else weight.data_ptr()
        self.invoke(
            "rotate", x.data_ptr(), scale, cosines.data_ptr(), sines.data_ptr(),
            positions.data_ptr(), *x.shape, eps,
        )  # fmt: skip
        return x

    def silu_times(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        out = torch.empty_like(gate)
        self.invoke("silu_times", gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel())
        return out

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, where: Where, scale: float,
        store: RowStore, prompts: RowStore,
    ) -> Tensor:  # fmt: skip
        """Store the new keys and values, and return the attention over each row."""
        keys, values = store.layer(layer, k[:, :, None])
        first_keys, first_values = prompts.layer(layer, k[:, :, None])
        out = torch.empty_like(q)
        work = Work(
            keys.data_ptr(), values.data_ptr(), first_keys.data_ptr(), first_values.data_ptr(),
            where.lengths.data_ptr(), where.slots.data_ptr(), where.shared.data_ptr(),
            keys.shape[2], first_keys.shape[2], *q.shape[:2], *k.shape[1:],
            torch.get_num_threads(), scale,
        )  # fmt: skip
        self.invoke(
            "attend", ctypes.addressof(work), q.data_ptr(), k.data_ptr(), v.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log softmax of rows of logits, as `log_probabilities` of sampling.py does."""
        out = logits.clone(memory_format=torch.contiguous_format)
        self.invoke("log_probabilities", out.data_ptr(), *out.shape, torch.get_num_threads())
        return out

    def inverse_cdf(self, logprobs: Tensor, uniform: Tensor) -> Tensor:
        """Draw a token of each row, as `inverse_cdf` of sampling.py does."""
        logprobs = logprobs.contiguous()
        tokens = torch.empty(len(logprobs), dtype=torch.long)
        self.invoke(
            "inverse_cdf", logprobs.data_ptr(), uniform.data_ptr(), tokens.data_ptr(),
            *logprobs.shape, torch.get_num_threads(),
        )  # fmt: skip
        return tokens

    def invoke(self, name: str, *arguments: int | float | None) -> None:
        """Call a function of native.c, without the interpreter's lock."""
        if getattr(self._library, name)(*arguments):
            raise _no_memory(name)

    def count(self, name: str, *arguments: int) -> int:
        """Call a function of native.c that returns a count, without the interpreter's lock."""
        counted = getattr(self._library, name)(*arguments)
        if counted < 0:
            raise _no_memory(name)
        return counted


def _no_memory(name: str) -> MemoryError:
    return MemoryError(f"no memory is left for the engine's {name}")


def load(source: Path, signatures: Mapping[str, Sequence[Any]], *flags: str) -> ctypes.CDLL:
    """Load the library of a C source, compiled first if the cache folder does not have it, for this
    processor or the kind that TRIREME_NATIVE names. `signatures`: the types of its functions'
    arguments. Raises OSError.
    """
    library = _load(source, flags)
    for name, types in signatures.items():
        getattr(library, name).argtypes = types
    return library


@cache
def _load(source: Path, more: tuple[str, ...]) -> ctypes.CDLL:
    processor = os.environ.get("TRIREME_NATIVE") or "native"
    if processor == "0":
        raise OSError("TRIREME_NATIVE is 0")
    arm = platform.machine() in ("aarch64", "arm64")  # its clang does not know -march=native
    flags = [*FLAGS, f"-m{'cpu' if arm else 'arch'}={processor}", *more]
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if compiler is None:
        raise OSError("there is no C compiler (gcc, clang or cc)")
    openmp()  # GOMP_parallel is torch's own, so that both share one pool of threads
    try:
        return ctypes.CDLL(str(_compiled(source, compiler, [*flags, "-fopenmp"])))
    except OSError as error:
        library = ctypes.CDLL(str(_compiled(source, compiler, flags)))
        logger.info("%s is compiled for one thread alone: %s", source.name, error)
        return library


def _compiled(source: Path, compiler: str, flags: list[str]) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    texts = source.read_text(), SHARED.read_text()
    text = "\n".join([*texts, version, " ".join(flags), _processor()])
    folder = _folder()
    target = folder / f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as name:
        object_file, library = Path(name, "part.o"), Path(name, "part.so")
        for command in (
            [compiler, *flags, f"-I{SHARED.parent}", "-c", str(source), "-o", str(object_file)],
            [compiler, "-shared", str(object_file), "-lm", "-o", str(library)],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-200:]}")
        library.replace(target)
    return target


def _folder() -> Path:
    """Return the folder of compiled libraries. Raises OSError if others may write to the only one
    left.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trireme"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except RuntimeError:  # there is no home folder
        folder = Path(tempfile.gettempdir(), f"trireme-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not private or status.st_uid != os.getuid():
        raise OSError(f"{folder} is not a private folder of this user")
    return folder


def _processor() -> str:
    """Return the processor's features, on which -march=native depends: several machines may share a
    home folder.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((x for x in lines if x.startswith(("flags", "Features"))), platform.machine())
