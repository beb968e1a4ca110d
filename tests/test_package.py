"""The package as others get it: built, checked, installed by itself, and run outside the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import trireme
from tests.limits import HANG_S

ROOT = Path(__file__).parent.parent
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
SMALL = (
    "stages.0.buffer.total_steps=2", "stages.0.buffer.train_batch_size=2", "buffer.total_steps=1",
    "buffer.batch_size=2", "buffer.explorer_input.eval_tasksets=[]",
)  # fmt: skip


def call(*words: str | Path, cwd: Path, **environment: str) -> str:
    """What a program prints; it must end with 0, and show no progress bar of another's."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "%|" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    tree = tmp_path_factory.mktemp("tree")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("trireme", "trinity"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=left_out)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "dist", tree, cwd=tree)
    return tree / "dist"


def empty_environment(folder: Path) -> Path:
    """An environment's interpreter; it finds what the tests' one has installed, and no Trireme.

    The packages come by a `.pth` file, whose folders' own `.pth` files are not read: an editable
    installation of the tree stays out.
    """
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    [packages] = folder.glob("lib/python3*/site-packages")
    here = [p for p in sys.path if Path(p).name == "site-packages"]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in here))
    return folder / "bin" / "python"


@pytest.mark.slow
def test_the_wheel_runs_the_demo_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    python = empty_environment(tmp_path / "env")
    offline = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
         wheel, cwd=tmp_path)  # fmt: skip
    program = tmp_path / "env" / "bin" / "trireme"
    place = call(python, "-c", "import trireme; print(trireme.__file__)", cwd=tmp_path, **offline)
    assert Path(place.strip()).is_relative_to(tmp_path / "env")
    for words in ((program,), (tmp_path / "env" / "bin" / "trinity",), (python, "-m", "trireme")):
        said = call(*words, "--version", cwd=tmp_path, **offline)
        assert said == f"trireme {trireme.__version__}\n"
    (outside := tmp_path / "outside").mkdir()
    told = call(program, "run", *SMALL, cwd=outside, **offline, OMP_NUM_THREADS="1")
    assert told.startswith(f"trireme {trireme.__version__}: the demo")
    assert told.splitlines()[-1].split()[:3] == ["next", "trireme", "view"]
    looks = told.splitlines()[-1].replace("trireme", str(program), 1).split()[1:]
    call(*looks, "--plain", cwd=outside)
    call(*looks, "--html", "report.html", cwd=outside)
    report = (outside / "report.html").read_text(encoding="utf-8")
    page = ROOT / "trireme" / "ext" / "page"
    for part in ("uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "static/style.css"):
        assert (page / part).read_text(encoding="utf-8") in report, part
    assert "arithmetic" in report and "/static/" not in report and "/uplot/" not in report
    job = outside / "checkpoints" / "Trireme-demo" / "arithmetic"
    assert (job / "summary.json").is_file()
    assert (job / "grpo/global_step_1/actor/huggingface/model.safetensors").is_file()


@pytest.mark.slow
def test_the_wheel_and_the_sdist_are_whole(built: Path) -> None:
    wheel, sdist = next(built.glob("*.whl")), next(built.glob("*.tar.gz"))
    assert wheel.name.startswith(f"trireme_rl-{trireme.__version__}-")
    call(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=built)
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        [metadata] = [file.read(n).decode() for n in names if n.endswith(".dist-info/METADATA")]
    assert "License-Expression: Apache-2.0\n" in metadata
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "trireme",
        "trinity",
    }
    tracked = {
        str(path.relative_to(ROOT))
        for folder in ("trireme", "trinity")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert tracked <= set(names)
    with tarfile.open(sdist) as file:
        told = {name.partition("/")[2] for name in file.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", *tracked} <= told


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (trireme.__version__, "Apache-2.0")


@pytest.mark.extension("trinity", "vllm")  # packages and pins that are copied by name
@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_an_image_copies_what_the_build_context_holds(image: Path) -> None:
    text = image.read_text(encoding="utf-8")
    copied = [w for line in re.findall(r"^COPY (.*)$", text, re.M) for w in line.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert [name for name in copied if f"!{name}" not in ignored] == []


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_hadolint_finds_nothing_in_an_image(image: Path) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}"
                           f"{os.environ.get('PATH', '')}")  # fmt: skip
    if program is None:
        pytest.skip("hadolint has no build for this machine")
    call(program, image, cwd=ROOT)
