"""GPUs: asks CUDA's driver what GPUs a run can use on this machine, and how large they are.

The driver is asked in a child process, by its library: files in /dev may be there without a driver,
or belong to other containers, and are missing under WSL. torch is not imported; its build is read
from a file.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ASK_S = 60
"""Seconds that a driver gets: the first call on a machine of many GPUs takes some."""
_ASK = """
import ctypes, json, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
version, count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
attribute_value = ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
sizes, capabilities = [], []
for number in range(count.value):
    code = code or cuda.cuDeviceGet(ctypes.byref(device), number)
    code = code or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    sizes.append(size.value)
    capability = []
    for attribute in (75, 76):
        code = code or cuda.cuDeviceGetAttribute(ctypes.byref(attribute_value), attribute, device)
        capability.append(attribute_value.value)
    capabilities.append(capability)
found = {"sizes": sizes, "capabilities": capabilities}
print(json.dumps({"driver": version.value, "code": code, **found}))
"""
_CODES = {
    3: "the driver is not initialized",
    100: "the driver sees no GPU",
    802: "the system is not ready: is the fabric manager running?",
    803: "the driver's library and its kernel module have different versions",
    804: "the driver's compatibility library does not support this GPU",
    999: "an unknown error of the driver",
}
"""CUDA's error codes that installations end in."""
_FILES, _ROCM_FILES = ("nvidia[0-9]*", "dxg"), ("kfd", "dxg")
"""Devices of a GPU that CUDA and ROCm use, on Linux and under WSL."""


class Gpus(NamedTuple):
    """The GPUs of a machine that a run can use."""

    num: int = 0
    memory: int | None = None
    """Bytes of the smallest; None: not known."""


class Driver(NamedTuple):
    """What the driver says."""

    sizes: tuple[int, ...] = ()
    """The memory of each GPU that it shows to this process."""
    capabilities: tuple[tuple[int, int], ...] = ()
    """The compute capability of each."""
    against: str = ""
    """The reason why torch can use none of them; '': it can."""


def num_gpus() -> int:
    """Return the number of GPUs that the installed torch can use."""
    return gpus_here().num


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU that a run can use on this machine; None: none."""
    return gpus_here().memory


def oldest_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of the GPUs that a run can use here; None: it can use
    none.
    """
    if not num_gpus():
        return None
    return min(_ask(os.environ.get("CUDA_VISIBLE_DEVICES")).capabilities, default=None)


def gpus_here() -> Gpus:
    """Return the GPUs of this machine, among those of CUDA_VISIBLE_DEVICES."""
    if _hidden() or torch_cuda() is None:
        return Gpus()
    found = _ask(os.environ.get("CUDA_VISIBLE_DEVICES"))
    sizes = () if found.against else found.sizes
    return Gpus(len(sizes), min(sizes, default=None))


def why_no_gpu() -> str:
    """Say why a run can use no GPU although the machine has one; else ''."""
    if _hidden():
        return ""
    if re.search(r"^hip\b[^=]*=\s*['\"]", _torch_build(), re.MULTILINE):
        on_rocm = "its torch is built for ROCm, and runs use NVIDIA GPUs alone"
        return on_rocm if _has_files(*_ROCM_FILES) else ""
    if (sys.platform, platform.machine()) == ("darwin", "arm64"):
        return "it is Apple's, and runs use NVIDIA GPUs alone"
    if not _has_files(*_FILES):
        return ""
    if torch_cuda() is None:
        return "its torch is built without CUDA"
    return _ask(os.environ.get("CUDA_VISIBLE_DEVICES")).against


def torch_cuda() -> tuple[int, int] | None:
    """Return the version of CUDA that the installed torch is built for; None: for none."""
    found = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)\.(\d+)", _torch_build(), re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def _torch_build() -> str:
    """Return the file in which torch says what it is built for; '': there is none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""


def _hidden() -> bool:
    """True if the user hides all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in ("", "-1")


def _has_files(*names: str) -> bool:
    return any(True for name in names for _ in Path("/dev").glob(name))


@lru_cache(maxsize=8)
def _ask(visible: str | None) -> Driver:
    """Ask the driver, which reads CUDA_VISIBLE_DEVICES (`visible`) itself; only once, since GPUs do
    not come and go.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ASK], capture_output=True, text=True, timeout=ASK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver(against=f"the driver could not be asked: {error}")
    if done.returncode != 0:
        return Driver(against=f"asking the driver ended with exit code {done.returncode}")
    facts = json.loads(done.stdout)
    if "error" in facts:
        return Driver(against=f"there is no driver that can be loaded: {facts['error']}")
    driver, built = divmod(facts["driver"] // 10, 100), torch_cuda() or (0, 0)
    if driver[0] < built[0]:
        return Driver(
            against=f"its driver supports CUDA {driver[0]}.{driver[1]}, and torch is built for "
            f"CUDA {built[0]}.{built[1]}: expected a newer driver, or a torch for CUDA {driver[0]}"
        )
    if code := facts["code"]:
        return Driver(against=_CODES.get(code, f"the driver answers with error {code}"))
    capabilities = tuple((major, minor) for major, minor in facts["capabilities"])
    return Driver(tuple(facts["sizes"]), capabilities, "" if facts["sizes"] else _CODES[100])
