"""The tutorials run as pasted: their files in a folder `lab`, their commands reduced in size."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, Forked, environment, trireme, wait_for
from tests.faults.jobs import free_port
from tests.limits import HANG_S
from trireme.demo.prepare import prepare

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
MODEL = "checkpoints/Trireme-demo/arithmetic/sft_warmup/global_step_250/actor/huggingface"
FENCE = re.compile(r"^```(python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = (
    "algorithm.repeat_times=2",
    "buffer.batch_size=2",
    "buffer.train_batch_size=4",
    "buffer.total_steps=1",
)
STAGES = ("stages[0].buffer.total_steps=1", "stages[0].buffer.train_batch_size=4")


def files_of(page: Path) -> Iterator[tuple[str, str]]:
    """The files that a page shows: a block's is the one named last before it, of its kind."""
    text, end = page.read_text(encoding="utf-8"), 0
    for block in FENCE.finditer(text):
        suffix = "py" if block[1] == "python" else "yaml"
        named = re.findall(rf"`(lab/\w+\.{suffix})`", text[end : block.start()])
        if named:
            yield named[-1], block[2]
        end = block.end()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository's folder after tutorial 101, with a model that has learned nothing."""
    folder = tmp_path_factory.mktemp("tutorials")
    assets = prepare(folder / "checkpoints/arithmetic_assets/seed_0", 0)
    shutil.copytree(assets / "model", folder / MODEL)
    (folder / "lab").mkdir()
    for page in PAGES:
        for name, code in files_of(page):
            (folder / name).write_text(code)
    for name in ("make_secrets.py", "make_calls.py", "make_shop.py"):
        script(folder, f"lab/{name}")
    [edit] = re.findall(r"^sed .*", PAGES[3].read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run(edit, shell=True, cwd=folder, check=True)
    evaluated = ("lab/calls/test.jsonl", "lab/shop/test.jsonl")
    for test in (assets / "test.jsonl", *(folder / name for name in evaluated)):
        test.write_text("".join(test.read_text().splitlines(keepends=True)[:4]))
    return folder


def script(place: Path, *words: str) -> str:
    """What one of the files prints, once it has ended well."""
    out = subprocess.run(
        [sys.executable, *words], cwd=place, env=environment(), capture_output=True, text=True,
        timeout=HANG_S,
    )  # fmt: skip
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


def done(place: Path, *words: str) -> str:
    """What a command of the program prints, once it has ended well."""
    out = trireme(place, *words)
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


def test_every_page_but_the_first_shows_files() -> None:
    assert " ".join(page.name[:3] for page in PAGES) == "101 201 301 302 303 401 501 601"
    shown = {page.name[:3]: dict(files_of(page)) for page in PAGES}
    assert not shown["101"] and not shown["501"]
    assert all(shown[number] for number in ("201", "301", "302", "303", "401", "601"))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("brief", ()),
        ("guess", ()),
        ("calls", STAGES),
        ("shop", STAGES),
        ("async", ()),
        ("replay", ()),
    ],
)
def test_a_tutorials_yaml_runs(place: Path, name: str, overrides: tuple[str, ...]) -> None:
    printed = done(place, "run", f"lab/{name}.yaml", *SMALL, *overrides)
    assert "1/1" in printed or "1/30" in printed, printed


def test_the_agent_of_303_teaches_the_model_behind_its_server(place: Path) -> None:
    words = ("run", "lab/online.yaml", "buffer.train_batch_size=16", "buffer.total_steps=1")
    port = f"explorer.proxy_port={free_port()}"
    processes = [Forked((*words, mode, port), place) for mode in ("mode=serve", "mode=train")]
    url = place / "checkpoints/lab/online/explorer_server_url.txt"
    wait_for(url.exists, *processes)
    printed = script(place, "lab/agent.py", str(url), "2")
    assert "problems 0 to 1" in printed
    for process in processes:
        process.ends_well()


def test_the_model_of_601_is_loaded_by_transformers(place: Path) -> None:
    script(place, "lab/use.py", MODEL)


def test_the_split_of_501_is_checked(place: Path) -> None:
    text = (ROOT / "docs/tutorials/501_cluster.md").read_text(encoding="utf-8")
    [check] = re.findall(r"^trireme (check .*?[^\\])$", text, re.MULTILINE | re.DOTALL)
    printed = done(place, *check.replace("\\\n", " ").split())
    assert "places        3 on 1 node: 1 for engines (1 x 1), 2 for the trainer" in printed
