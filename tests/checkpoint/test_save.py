"""Checkpoints: the folder of the seed, whole or not at all, wherever a process dies."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.models import save_checkpoint, save_whole
from tests.limits import HANG_S
from trireme.checkpoint.layout import REFERENCE, JobFolder
from trireme.checkpoint.manifest import Loaded, load_checkpoint
from trireme.checkpoint.save import save_weights
from trireme.checkpoint.saved import read
from trireme.files import sync, whole_file

STATE = {
    "step": 0,
    "version": 3,
    "explorer": {"step": 7, "taskset": {"current_index": 28}},
    "buffer": {"puts": [2, 1], "experiences": b"\x00bytes\xff", "others": b"\x01"},
}


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"b.weight": torch.full((2, 3), value), "a.weight": torch.full((4,), -value)}


def save(job: Path, step: int, model: Path, *, hf: bool = True, keep: int | None = None) -> Path:
    return save_checkpoint(
        JobFolder(job),
        step,
        save=partial(
            save_whole,
            weights=weights(float(step)),
            optimizer={
                "state": {0: {"exp_avg": torch.ones(3) * step}},
                "param_groups": [{"lr": 0.1}],
            },
            extra={"rng": {"torch": torch.get_rng_state()}, "scheduler": {"last_epoch": step}},
            hf=hf,
        ),
        run_state=STATE | {"step": step},
        model_dir=model,
        keep=keep,
    )


def _first_weight(loaded: Loaded) -> float:
    own = {"b.weight": torch.empty(2, 3), "a.weight": torch.empty(4)}
    read(loaded.actor).fill(own)
    return float(own["a.weight"][0])


def test_the_folder_is_that_of_the_seed(tmp_path: Path, tiny_dir: Path) -> None:
    step = save(tmp_path, 58, tiny_dir)
    assert step == tmp_path / "global_step_58"
    files = {str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()}
    hf = {f"actor/huggingface/{n.name}" for n in tiny_dir.iterdir()}
    assert files == hf | {
        ".full_checkpoint",
        "manifest.json",
        "actor/optim_world_size_1_rank_0.pt",
        "actor/extra_state_world_size_1_rank_0.pt",
        "state/state.buffer.experiences.bin",
        "state/state.buffer.others.bin",
    }
    for path in tiny_dir.iterdir():
        copied = step / "actor" / "huggingface" / path.name
        assert path.suffix == ".safetensors" or copied.read_bytes() == path.read_bytes()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "58"
    assert (tmp_path / "latest_state_dict_iteration.txt").read_text() == "58"
    assert json.loads((tmp_path / "trainer_meta.json").read_text()) == {"latest_iteration": 58}
    assert json.loads((tmp_path / "explorer_meta.json").read_text()) == {
        "latest_iteration": 7,
        "taskset_states": [{"current_index": 28}],
    }


@pytest.mark.parametrize("hf", [True, False])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, tiny_dir: Path, hf: bool) -> None:
    save(tmp_path, 5, tiny_dir, hf=hf)
    loaded = load_checkpoint(JobFolder(tmp_path))
    assert loaded is not None and loaded.step == 5
    assert loaded.run_state == STATE | {"step": 5}
    assert _first_weight(loaded) == -5
    saved = read(loaded.actor)
    assert torch.equal(saved.optimizer["state"][0]["exp_avg"], torch.ones(3) * 5)
    assert saved.extra["scheduler"] == {"last_epoch": 5}
    assert JobFolder(tmp_path).weights_dir(5).name == ("huggingface" if hf else "actor")


def test_a_reference_is_no_weights_to_load(tmp_path: Path) -> None:
    """Where ranks trained and nothing is exported, nobody else can load the policy."""
    job = JobFolder(tmp_path)
    (job.actor_dir(4) / REFERENCE).parent.mkdir(parents=True)
    (job.actor_dir(4) / REFERENCE).touch()
    job.latest_weights.write_text("4")
    assert job.latest_weights_step() is None


def test_equal_weights_give_equal_bytes(tmp_path: Path, tiny_dir: Path) -> None:
    made = [save(tmp_path / name, 1, tiny_dir) for name in "ab"]
    first, second = (p / "actor" / "huggingface" / "model.safetensors" for p in made)
    assert first.read_bytes() == second.read_bytes()


def test_a_job_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    assert load_checkpoint(JobFolder(tmp_path / "none")) is None


def test_old_checkpoints_go_when_only_some_are_kept(tmp_path: Path, tiny_dir: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, tiny_dir, keep=2)
    assert JobFolder(tmp_path).steps() == [3, 4]


def test_weights_alone_are_published_and_the_older_ones_go(tmp_path: Path, tiny_dir: Path) -> None:
    job = JobFolder(tmp_path)
    assert job.latest_weights_step() is None
    for step in (1, 2, 3):
        save_weights(job, step, weights=weights(step), extra_files={"probe.json": b"{}"})
    assert job.latest_weights_step() == 3 and job.steps() == [2, 3]
    assert list(load_file(job.weights_dir(3) / "model.safetensors")) == ["a.weight", "b.weight"]
    assert load_checkpoint(job) is None
    save(tmp_path, 3, tiny_dir)
    assert (job.step_dir(3) / "probe.json").exists(), "the probe stays beside the weights"
    save_weights(job, 4, weights=weights(4))
    assert job.is_full(3) and not job.is_full(4) and job.latest_weights_step() == 4
    assert job.latest_checkpoint.read_text() == "3"
    loaded = load_checkpoint(job)
    assert loaded is not None and loaded.step == 3


def test_publishing_the_weights_of_a_full_checkpoint_leaves_it_whole(
    tmp_path: Path, tiny_dir: Path
) -> None:
    save(tmp_path, 3, tiny_dir)
    save_weights(JobFolder(tmp_path), 3, weights=weights(3), extra_files={"probe.json": b"{}"})
    assert (tmp_path / "global_step_3" / "probe.json").read_bytes() == b"{}"
    assert load_checkpoint(JobFolder(tmp_path)) is not None


def test_weights_are_published_while_the_disk_takes_or_removes_a_checkpoint(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step, tiny_dir)
    rmtree, published = shutil.rmtree, iter(range(4, 1000))
    slow: list[str] = []
    here = threading.current_thread()

    def publish() -> None:
        step = next(published)
        thread = threading.Thread(
            target=lambda: save_weights(JobFolder(tmp_path), step, weights=weights(0.0)),
            daemon=True,
        )
        thread.start()
        thread.join(HANG_S)
        assert not thread.is_alive(), "the training would wait"

    def slow_sync(path: Path) -> None:
        if path.name == "manifest.json" and not slow:  # where it is synced again it is quick
            slow.append(path.name)
            publish()
        sync(path)

    def slow_rmtree(path: Path, **options: Any) -> None:
        if path.exists() and threading.current_thread() is here:
            slow.append(path.name.split("-")[1])
            publish()
        rmtree(path, **options)

    monkeypatch.setattr("trireme.files.sync", slow_sync)
    monkeypatch.setattr(shutil, "rmtree", slow_rmtree)
    save_weights(JobFolder(tmp_path), 3, weights=weights(3.0))
    save(tmp_path, 3, tiny_dir, keep=1)
    assert slow == ["manifest.json", "global_step_3", "global_step_1", "global_step_2"]
    assert not list(tmp_path.glob(".tmp-*"))


class Killed(BaseException):
    """The process dies here."""


def calls_of(job: Path, model: Path, monkeypatch: pytest.MonkeyPatch, die_at: int | None) -> int:
    """Save step 2, dying at the n-th rename; how many renames there were."""
    count = 0
    rename = os.replace

    def replace(source: Any, target: Any) -> None:
        nonlocal count
        if die_at == count:
            raise Killed
        count += 1
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        # a process that is killed cleans nothing up
        patch.setattr("shutil.rmtree", lambda *args, **options: None)
        patch.setattr(Path, "unlink", lambda *args, **options: None)
        try:
            save(job, 2, model)
        except Killed:
            assert die_at is not None
    return count


@pytest.mark.parametrize("again", [False, True])
def test_dying_at_any_rename_leaves_a_checkpoint_to_go_on_from(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """`again`: the step has a checkpoint already, and it is the only one."""
    save(tmp_path / "count", 2 if again else 1, tiny_dir)
    renames = calls_of(tmp_path / "count", tiny_dir, monkeypatch, None)
    assert renames >= 5
    for die_at in range(renames):
        job = tmp_path / str(die_at)
        save(job, 2 if again else 1, tiny_dir)
        calls_of(job, tiny_dir, monkeypatch, die_at)
        folder = JobFolder(job)
        loaded = load_checkpoint(folder, folder.explorer_meta)
        assert loaded is not None and loaded.step in ((2,) if again else (1, 2))
        assert _first_weight(loaded) == -loaded.step
        assert not list(job.glob(".tmp-*")), "what was left half-written is removed"
        save(job, 3, tiny_dir)
        assert JobFolder(job).latest_weights_step() == 3


def test_a_trainer_that_starts_leaves_a_living_explorers_unfinished_file(tmp_path: Path) -> None:
    unfinished = [".tmp-trainer_meta.json-1-a", ".tmp-latest_state_dict_iteration.txt-1-a"]
    unfinished += [".tmp-sync_state.json-1-a", ".tmp-global_step_2-1-a"]
    for name in unfinished:
        (tmp_path / name).touch()
    with whole_file(tmp_path / "first_meta.json") as temporary:
        temporary.write_text("{}")
        assert load_checkpoint(JobFolder(tmp_path)) is None
    assert [path.name for path in tmp_path.iterdir()] == ["first_meta.json"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_under_a_temporary_name_is_put_back_where_it_is_whole(
    tmp_path: Path, tiny_dir: Path, whole: bool
) -> None:
    save(tmp_path, 1, tiny_dir)
    path = save(tmp_path, 2, tiny_dir)
    if not whole:
        (path / "actor/huggingface/model.safetensors").write_bytes(b"half of it")
    path.rename(tmp_path / ".tmp-global_step_2-0a1b")
    loaded = load_checkpoint(JobFolder(tmp_path))
    assert loaded is not None and loaded.step == 1 + whole
    assert JobFolder(tmp_path).steps() == [1, 2][: 1 + whole]
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(
    tmp_path: Path, tiny_dir: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.checkpoint.test_save import save\n"
        "for step in range(1, 100000):\n"
        "    save(Path(sys.argv[1]), step, Path(sys.argv[2]), keep=2)\n"
        "    print(step, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(tiny_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        reported = [int(process.stdout.readline()) for _ in range(5)][-1]
        process.kill()
    loaded = load_checkpoint(JobFolder(tmp_path))
    assert loaded is not None and loaded.step >= reported
    assert _first_weight(loaded) == -loaded.step


def every_file(root: Path) -> list[Path]:
    """What a checkpoint holds, and its manifest; `.full_checkpoint` has no bytes."""
    return sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_to_any_file_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path, tiny_dir: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, tiny_dir)
    for damaged in every_file(save(tmp_path, 2, tiny_dir)):
        was = damaged.read_bytes()
        if how == "gone":
            damaged.unlink()
        else:
            place = len(was) // 2
            flipped = was[:place] + bytes([was[place] ^ 1]) + was[place + 1 :]
            damaged.write_bytes(flipped if how == "flipped" else was[:-7])
        caplog.clear()
        loaded = load_checkpoint(JobFolder(tmp_path))
        assert loaded is not None and loaded.step == 1, damaged
        [said] = [r.getMessage() for r in caplog.records if "passed by" in r.getMessage()]
        assert str(damaged) in said and "\n" not in said
        damaged.write_bytes(was)
    loaded = load_checkpoint(JobFolder(tmp_path))
    assert loaded is not None and loaded.step == 2


def test_where_every_checkpoint_is_damaged_nothing_begins_anew(
    tmp_path: Path, tiny_dir: Path
) -> None:
    for step in (1, 2):
        path = save(tmp_path, step, tiny_dir) / "actor/huggingface/model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(
        ValueError, match=r"another name.*continue_from_checkpoint: false"
    ) as raised:
        load_checkpoint(JobFolder(tmp_path))
    assert "global_step_2/actor/huggingface/model.safetensors has the checksum" in str(raised.value)
    assert JobFolder(tmp_path).steps() == [1, 2]


MALFORMED = {
    "a list": [],
    "null": None,
    "no files": {"files": ...},
    "no state": {"state": ...},
    "no buffer": {"state": {"version": 1}},
    "files of another kind": {"files": ["a"]},
    "another step": {"step": 999},
    "another format": {"format": "trireme-checkpoint-9"},
    "a step of another kind": {"step": "2"},
    "a state that is no path": {"state": {"version": 1, "buffer": {"x": {"$file": 3}}}},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_manifest_of_another_kind_is_passed_by(tmp_path: Path, tiny_dir: Path, what: str) -> None:
    save(tmp_path, 1, tiny_dir)
    path = save(tmp_path, 2, tiny_dir) / "manifest.json"
    change = MALFORMED[what]
    if isinstance(change, dict):  # the first format: no checksum of its own protects it
        changed = json.loads(path.read_text()) | {"format": "trireme-checkpoint-1"} | change
        gone = ("checksum", *(key for key, value in change.items() if value is ...))
        change = {key: value for key, value in changed.items() if key not in gone}
    path.write_text(json.dumps(change))
    loaded = load_checkpoint(JobFolder(tmp_path))
    assert loaded is not None and loaded.step == 1


def test_a_checkpoint_without_checksums_is_gone_on_from_and_the_log_says_so(
    tmp_path: Path, tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path, 1, tiny_dir) / "manifest.json"
    manifest = json.loads(path.read_text()) | {"format": "trireme-checkpoint-1"}
    old = {key: value for key, value in manifest.items() if key not in ("checksum", "xxh3_128")}
    path.write_text(json.dumps(old))
    loaded = load_checkpoint(JobFolder(tmp_path))
    assert loaded is not None and loaded.step == 1 and _first_weight(loaded) == -1
    assert "saved without checksums" in caplog.text


@pytest.mark.parametrize("inside", ["files", "state"])
@pytest.mark.parametrize("name", ["../outside.bin", "state/../../outside.bin", "{}/outside.bin"])
def test_a_manifest_that_names_a_file_outside_its_folder_is_passed_by(
    tmp_path: Path, tiny_dir: Path, inside: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, tiny_dir)
    path = save(tmp_path, 2, tiny_dir) / "manifest.json"
    (tmp_path / "outside.bin").write_bytes(b"12345")  # there, and as large as is said
    manifest = json.loads(path.read_text()) | {"format": "trireme-checkpoint-1"}
    for key in ("checksum", "xxh3_128"):
        del manifest[key]
    name = name.format(tmp_path)
    manifest["files"][name] = 5
    if inside == "state":
        manifest["state"]["buffer"]["experiences"] = {"$file": name}
    path.write_text(json.dumps(manifest))
    loaded = load_checkpoint(JobFolder(tmp_path))
    assert loaded is not None and loaded.step == 1
    assert f"{path} names the file '{name}': expected a path inside its folder" in caplog.text


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optim_world_size_1_rank_0.pt", "config.json"]
)
def test_a_full_disk_is_one_line_that_names_the_path(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(tmp_path, 1, tiny_dir)
    with monkeypatch.context() as patch:
        if file == "config.json":
            patch.setattr("shutil.copyfile", full)
        else:
            where = "save_file" if file == "model.safetensors" else "torch.save"
            patch.setattr(f"trireme.checkpoint.save.{where}", full)
        with pytest.raises(OSError, match=r"cannot write .*: No space left on device") as raised:
            save(tmp_path, 2, tiny_dir)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)
    assert JobFolder(tmp_path).steps() == [1] and not list(tmp_path.glob(".tmp-*"))


def test_a_file_size_limit_stops_the_real_writers_with_one_line(
    tmp_path: Path, tiny_dir: Path
) -> None:
    code = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from trireme.checkpoint.save import write_weights, write_pt\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "for write in (write_weights, write_pt):\n"
        "    try: write(Path(sys.argv[1]) / 'big', {'w': torch.ones(9999)})\n"
        "    except OSError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(
        line.startswith(f"cannot write {tmp_path}/big: ") for line in lines
    )


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file where the folder should be")
    with pytest.raises(OSError, match=r"cannot write .*/job/buffer"):
        JobFolder(tmp_path / "job").make()
