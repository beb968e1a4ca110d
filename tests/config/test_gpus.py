"""What CUDA's driver says of this machine, by a driver of ours, and what a plan makes of it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.config.made import plan_of
from trireme.config import gpus
from trireme.config.gpus import (
    Gpus,
    gpu_bytes,
    gpus_here,
    num_gpus,
    oldest_capability,
    why_no_gpu,
)

LIBRARY = """
#include <stdlib.h>
#include <string.h>
static int number(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}
int cuInit(unsigned flags) { return number("FAKE_INIT"); }
int cuDriverGetVersion(int *version) { *version = number("FAKE_DRIVER"); return 0; }
int cuDeviceGetCount(int *count) { *count = number("FAKE_GPUS"); return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) {
    *size = (size_t)(80 - 40 * device) << 30;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 - 2 * device : attribute == 76 ? 5 : -1;
    return 0;
}
"""

Set = Callable[..., None]
"""Sets facts of the driver by name."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a `libcuda.so.1` that says what the environment tells it."""
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(LIBRARY)
    words = ["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"]
    subprocess.run(words, check=True)
    return folder


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Set]:
    """Sets what the driver says; torch is one for CUDA 13.0, and /dev has files of GPUs."""
    monkeypatch.setattr(gpus, "torch_cuda", lambda: (13, 0))
    monkeypatch.setattr(gpus, "_has_files", lambda *_: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))

    def says(**facts: int) -> None:
        for name, value in {"driver": 13000, "gpus": 2, "init": 0, **facts}.items():
            monkeypatch.setenv(f"FAKE_{name.upper()}", str(value))
        gpus._ask.cache_clear()

    says()
    yield says
    gpus._ask.cache_clear()


def test_the_driver_says_how_many_gpus_there_are_and_how_large_the_smallest_is(driver: Set) -> None:
    assert gpus_here() == Gpus(2, 40 * 2**30) and not why_no_gpu()
    assert oldest_capability() == (7, 5)
    driver(gpus=1)
    assert (num_gpus(), gpu_bytes(), oldest_capability()) == (1, 80 * 2**30, (9, 5))
    driver(gpus=0)
    assert oldest_capability() is None


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"driver": 12040}, "its driver supports CUDA 12.4, and torch is built for CUDA 13.0: exp"),
        ({"gpus": 0}, "the driver sees no GPU"),
        ({"init": 100}, "the driver sees no GPU"),
        ({"init": 803}, "the driver's library and its kernel module have different versions"),
        ({"init": 35}, "the driver answers with error 35"),
    ],
)
def test_where_cuda_cannot_be_used_a_run_is_on_the_cpu_and_says_why(
    driver: Set, facts: dict[str, int], why: str, tmp_path: Path
) -> None:
    driver(**facts)
    assert gpus_here() == Gpus() and why_no_gpu().startswith(why)
    plan = plan_of(tmp_path)
    assert plan.device == "cpu"
    said = [
        note for note in plan.notes if note.startswith("device: the CPU, although this machine")
    ]
    assert len(said) == 1 and why in said[0]


def test_without_a_driver_files_of_gpus_are_not_enough(
    driver: Set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcuda.so.1").touch()  # found before any other, and no library
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert num_gpus() == 0
    assert why_no_gpu().startswith("there is no driver that can be loaded: ")


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_gpus_that_the_user_hides_are_not_asked_for(
    driver: Set, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked"))
    assert gpus_here() == Gpus() and not why_no_gpu()


def test_a_torch_without_cuda_is_known_by_its_own_file(
    driver: Set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for the CPU need not have `+cpu` in its version: conda's has not."""
    monkeypatch.undo()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    spec: Any = type("Spec", (), {"origin": str(tmp_path / "torch/__init__.py")})
    monkeypatch.setattr(gpus, "find_spec", lambda name: spec)
    file = tmp_path / "torch/version.py"
    for text, version in (
        ("__version__ = '2.13.0'\ncuda: Optional[str] = None\n", None),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n", (13, 0)),
        ("__version__ = '2.6.0'\ncuda = '12.4'\n", (12, 4)),
    ):
        file.write_text(text)
        assert gpus.torch_cuda() == version
    monkeypatch.setattr(gpus, "torch_cuda", lambda: None)
    monkeypatch.setattr(gpus, "_has_files", lambda *_: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_here() == Gpus() and why_no_gpu() == "its torch is built without CUDA"


@pytest.mark.parametrize(
    ("built", "system", "machine", "why"),
    [
        ("hip: Optional[str] = '6.4.43482'", "linux", "x86_64", "its torch is built for ROCm, and"),
        ("hip: Optional[str] = None", "darwin", "arm64", "it is Apple's, and runs use NVIDIA GPUs"),
        ("hip: Optional[str] = None", "darwin", "x86_64", ""),
        ("hip: Optional[str] = None", "linux", "aarch64", ""),
    ],
)
def test_a_gpu_of_another_maker_is_not_left_idle_in_silence(
    built: str,
    system: str,
    machine: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "version.py").write_text(f"cuda: Optional[str] = None\n{built}\n")
    spec: Any = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(gpus, "find_spec", lambda name: spec)
    monkeypatch.setattr(gpus.sys, "platform", system)
    monkeypatch.setattr(gpus.platform, "machine", lambda: machine)
    monkeypatch.setattr(gpus, "_has_files", lambda *names: "kfd" in names)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said = why_no_gpu()
    assert said.startswith(why) and bool(said) == bool(why) and num_gpus() == 0
