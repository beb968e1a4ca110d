"""Harness: tries every fault on real commands, and prints what each cost.

`python -m tests.faults.harness [--quick] [--only WORD] [--json FILE] [--docs]`: a table (fault,
tried, survived, lost, doubled, hung); exit code 1 where anything was lost, doubled or hung.
`--docs` writes it into docs/resume.md where all was tried. Survived means: the same command, given
again, ends with exit code 0, has learned from each experience once, as an uninterrupted run has,
and, where a run is byte-exact, ends with equal weights. After `--minutes` no more trials are begun;
the first of each fault come first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults.jobs import JOB, STEPS, config_of, final_weights, learned, write_config
from tests.faults.program import FILLER, HIT, Blow, start
from tests.limits import HANG_S
from tests.postgres import binaries, serving

ROOT = Path(__file__).parents[2]
MOUNT = ("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs")
EXACT = ("queue", "sql", "file", "queue fixed")
CODES = {"TERM": 143, "HUP": 129, "INT": 130, "INT INT": 130, "KILL": -9}
COMMON = (
    "train step", "checkpoint", "weights file", "optimizer file", "manifest", "pointers",
    "bring to disk", "old checkpoints", "model files",
)  # fmt: skip
EXPLORES = ("explore step begins", "explore step ends", "pull", "push", "copy written")
POINTS = {
    "queue": (*COMMON, *EXPLORES, "queue put", "queue take", "queue state"),
    "sql": ("train step", "checkpoint", "manifest", "explore step ends", "sql put", "sql take",
            "sql claim", "sql seal", "sql commit"),
    "replay": ("train step", "checkpoint", "replay put", "replay take", "replay state"),
    "file": (*COMMON[:5], "file take"),
    "queue fully_async": ("train step", "checkpoint", "push", "queue put"),
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One run with one fault."""

    fault: str
    kind: str
    how: str
    blow: Blow | None = None
    seed: int = 0


@dataclass
class Row:
    """What the trials of one fault came to."""

    fault: str
    tried: int = 0
    survived: int = 0
    lost: int = 0
    doubled: int = 0
    hung: int = 0
    hit: int = 0
    """In how many the point was really reached; of those that name one."""
    notes: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether all survived and nothing was lost, doubled or hung."""
        return self.survived == self.tried and not (self.lost or self.doubled or self.hung)


class Hung(Exception):
    """A run did not end."""


def trials(quick: bool) -> Iterator[Trial]:
    """All of them; `quick`: one of each kind that is cheap."""
    for kind, points in POINTS.items():
        for index, point in enumerate(points):
            for when in ("before", "after"):
                at = 2 if point in ("train step", "pull", "queue put", "bring to disk") else 1
                if not quick or (kind in ("queue", "sql") and index == 1):
                    name = f"SIGKILL at a named point, {kind}"
                    yield Trial(name, kind, "blow", Blow(point, when, at))
    for kind in POINTS:
        for seed in range(0 if quick else 3):
            yield Trial(f"SIGKILL at a random time, {kind}", kind, "random", seed=seed)
    for what in ("TERM", "HUP", "INT", "INT INT"):
        name = "Ctrl-C twice" if what == "INT INT" else {"INT": "Ctrl-C"}.get(what, f"SIG{what}")
        for kind in POINTS:
            if kind == "queue" or not quick:
                yield Trial(name, kind, "blow", Blow("train step", "after", 3, what))
    for what, name in (("FULL", "full disk"), ("EROFS", "read-only disk")):
        for point in ("weights file", "manifest", "copy written", "bring to disk", "pointers"):
            if point == "manifest" or not quick:
                yield Trial(name, "queue", "blow", Blow(point, "before", 1, what))
    yield Trial("flipped byte in a checkpoint", "queue", "flip", seed=-1 if quick else 0)
    for kind in () if quick else ("sql",):
        yield Trial("flipped byte in a checkpoint", kind, "flip")
    for style in NAMES:
        if not quick or style in ("raises", "clings"):
            yield Trial(NAMES[style], f"user {style}", "user")
    if quick:
        return
    yield Trial("SQLite locked for 30 s", "sql", "locked")
    yield Trial("PostgreSQL away for 30 s", "sql", "away")
    for what, name in (
        ("EIO", "an optimizer step that fails"),
        ("NAN", "gradients that are no numbers"),
    ):
        yield Trial(name, "queue", "blow", Blow("gradient", "before", 3, what))
    for mode, point in (("train", "published weights"), ("train", "sql claim"),
                        ("train", "sql commit"), ("explore", "sql put"),
                        ("explore", "explorer state")):  # fmt: skip
        for when in ("before", "after"):
            name = f"dead {'trainer' if mode == 'train' else 'explorer'} of two commands"
            yield Trial(name, "pair", f"pair {mode}", Blow(point, when, 2))
    for mode, point in (("train", "train step"), ("explore", "explore step ends")):
        blow = Blow(point, "after", 2, "TERM")
        yield Trial("SIGTERM to one of two commands", "pair", f"pair {mode}", blow)
    yield Trial("dead engine process", "engine", "engine")


NAMES = {
    "raises": "environment that raises",
    "hangs": "environment that hangs",
    "clings": "environment that ignores its cancellation",
    "rubbish": "environment that returns rubbish",
    "infinite": "rewards that are no numbers",
    "judge_hangs": "judge that hangs",
    "judge_rubbish": "judge that returns rubbish",
    "endpoint_hangs": "judge at an endpoint that hangs",
}


def ended(process: int, limit: float = HANG_S) -> int:
    """A child's exit code, negative for a signal. Raises Hung where it does not end."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise Hung


def command(folder: Path, blow: Blow | None = None, *overrides: str) -> int:
    """The job's command, started."""
    return start(folder, ["run", "--config", str(folder / "config.yaml"), *overrides], blow)


def again(folder: Path, *overrides: str) -> None:
    """The same command until it ends well. Raises RuntimeError where it does not."""
    codes = []
    for _ in range(3):
        codes.append(ended(command(folder, None, *overrides)))
        if codes[-1] == 0:
            return
    text = (folder / "output.txt").read_text().strip().splitlines()
    raise RuntimeError(f"given again, it ended with {codes}: {' | '.join(text[-2:])}")


def interrupted(trial: Trial, folder: Path) -> None:
    """One run with the fault, then runs without."""
    assert trial.blow is not None
    code = ended(command(folder, trial.blow))
    if not (folder / HIT).exists():
        raise RuntimeError("the point was never reached")
    (folder / FILLER).unlink(missing_ok=True)
    if trial.blow.what not in CODES:
        text = (folder / "output.txt").read_text()
        if code != 1 or "error: " not in text:
            raise RuntimeError(f"expected exit code 1 and a sentence, got {code}")
    elif code != CODES[trial.blow.what]:
        raise RuntimeError(f"expected exit code {CODES[trial.blow.what]}, got {code}")
    again(folder)


def at_random(trial: Trial, folder: Path) -> None:
    """SIGKILL some time after the folder is there."""
    process = command(folder)
    deadline = time.monotonic() + HANG_S
    while not (folder / JOB / "monitor").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.Random(f"{trial.kind}{trial.seed}").uniform(0, 4))
    os.kill(process, signal.SIGKILL)
    ended(process)
    again(folder)


def flipped(trial: Trial, folder: Path) -> None:
    """A byte of a file of each kind of the newest of two checkpoints, one after the other: the one
    before is used.
    """
    often = "trainer.save_interval=1"
    code = ended(command(folder, Blow("explore step ends", "before", 4), often))
    assert code == -9, code
    whole = sorted(path.parent for path in (folder / JOB).glob("global_step_*/manifest.json"))
    assert len(whole) > 1, whole
    kinds = {p.suffix: p for p in sorted(whole[-1].rglob("*")) if p.is_file() and p.stat().st_size}
    for path in list(kinds.values())[: None if trial.seed >= 0 else 1]:
        copy = folder.with_name(f"{folder.name}-{path.name}")
        shutil.copytree(folder, copy)
        config = (copy / "config.yaml").read_text().replace(str(folder), str(copy))
        (copy / "config.yaml").write_text(config)
        damaged = copy / path.relative_to(folder)
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        again(copy, often)
        if "is damaged and passed by" not in (copy / "output.txt").read_text():
            raise RuntimeError(f"{path.name}: nothing was said of it")
        if any(compare(trial.kind, copy)):
            raise RuntimeError(f"{path.name}: lost and doubled: {compare(trial.kind, copy)}")
        shutil.rmtree(copy)
    again(folder, often)


def locked(trial: Trial, folder: Path) -> None:
    """Another program holds the database for half a minute."""
    process = command(folder)
    database = folder / JOB / "buffer/shared.db"
    while not database.exists():
        time.sleep(0.01)
    time.sleep(1)
    with sqlite3.connect(database, timeout=60) as connection:
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(30)
        connection.rollback()
    ended(process)
    again(folder)


def away(trial: Trial, folder: Path) -> None:
    """The database server is stopped for half a minute, as by a crash: the same run ends well."""
    if (programs := binaries()) is None:
        raise RuntimeError("PostgreSQL is not installed: scripts/apt_setup.sh postgresql")
    with serving(programs) as server:
        store = f"buffer.trainer_input.experience_buffer.path={server.database()}"
        process = command(folder, None, store)
        log = folder / JOB / "monitor/metrics.jsonl"
        while not log.exists() or not log.read_text():
            time.sleep(0.01)
        with server.away():
            time.sleep(30)
        if code := ended(process):
            raise RuntimeError(f"ended with {code}")
    text = (folder / "output.txt").read_text()
    if not all(
        word in text for word in ("is unreachable, waiting for it", "database is reachable again")
    ):
        raise RuntimeError("nothing was said of it")


def two_commands(trial: Trial, folder: Path) -> None:
    """One of explorer and trainer dies, and is started again."""
    victim = trial.how.split()[1]
    running = {
        mode: command(folder, trial.blow if mode == victim else None, f"mode={mode}")
        for mode in ("explore", "train")
    }
    assert trial.blow is not None
    if (code := ended(running.pop(victim))) != CODES[trial.blow.what]:
        raise RuntimeError(f"expected exit code {CODES[trial.blow.what]}, got {code}")
    running[victim] = command(folder, None, f"mode={victim}")
    codes = {mode: ended(process) for mode, process in running.items()}
    if set(codes.values()) != {0}:
        raise RuntimeError(f"ended with {codes}")


def engine_dies(trial: Trial, folder: Path) -> None:
    """The engine process of a run is killed; it is started again by the run."""
    process = command(folder)
    log = folder / JOB / "monitor/metrics.jsonl"
    while not log.exists() or not log.read_text():
        time.sleep(0.02)
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    for child in children:
        if b"trireme.ext.http.process" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)
    if code := ended(process):
        raise RuntimeError(f"ended with {code}")


def user_code(trial: Trial, folder: Path) -> None:
    """A fault of the user's code in one of five rollouts: the run goes on without it."""
    again(folder)


HOW: dict[str, Callable[[Trial, Path], None]] = {
    "blow": interrupted, "random": at_random, "flip": flipped, "locked": locked,
    "away": away, "pair": two_commands, "engine": engine_dies, "user": user_code,
}  # fmt: skip
_references: dict[str, tuple[Counter[str], bytes | None]] = {}
_base = Path()


def prepare(base: str) -> None:
    """In each worker: what every run needs is loaded once."""
    global _base
    _base = Path(base)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = str(ROOT)
    import trireme.launch.run
    import trireme.trainer.trainer  # noqa: F401


def made(kind: str, folder: Path) -> Path:
    """A job's folder with its YAML."""
    folder.mkdir(parents=True)
    write_config(folder, config_of(kind, folder, _base / "model"))
    return folder


def reference(kind: str) -> tuple[Counter[str], bytes | None]:
    """What an uninterrupted run learns, and the weights it ends with."""
    if kind not in _references:
        folder = made(kind, _base / f"{kind}-{os.getpid()}".replace(" ", "-"))
        modes = ("mode=explore", "mode=train") if kind == "pair" else ("",)
        runs = [command(folder, None, *filter(None, [mode])) for mode in modes]
        codes = [ended(run) for run in runs]
        assert set(codes) == {0}, (folder / "output.txt").read_text()
        _references[kind] = learned(folder), final_weights(folder)
    return _references[kind]


def compare(kind: str, folder: Path) -> tuple[int, int]:
    """How many experiences were lost and doubled. Raises RuntimeError for other weights."""
    got = learned(folder)
    doubled = sum(count - 1 for count in got.values())
    if kind.startswith("user "):
        return max(3 * STEPS * 4 - len(got), 0), doubled
    expected, weights = reference(kind)
    lost = len(set(expected) - set(got))
    if not lost and not doubled and kind in EXACT and final_weights(folder) != weights:
        raise RuntimeError("the weights differ from those of an uninterrupted run")
    return lost, doubled


@contextmanager
def small_disk(folder: Path, trial: Trial) -> Iterator[Trial]:
    """A file system of its own where a disk is to be full; without root the write only says so."""
    blow = trial.blow
    if blow is None or blow.what != "FULL":
        yield trial
    elif os.geteuid() != 0 or subprocess.call([*MOUNT, str(folder)], stderr=subprocess.DEVNULL):
        yield replace(trial, blow=replace(blow, what="ENOSPC"))
    else:
        try:
            yield trial
        finally:
            subprocess.check_call(["umount", "--lazy", str(folder)])


def attempt(trial: Trial) -> Row:
    """One trial, on a folder of its own."""
    row = Row(trial.fault, tried=1)
    folder = Path(tempfile.mkdtemp(prefix="trial-", dir=_base)) / "job"
    try:
        with small_disk(folder.parent, trial) as tried:
            made(tried.kind, folder)
            HOW[tried.how.split()[0]](tried, folder)
            row.lost, row.doubled = compare(tried.kind, folder)
            row.hit = int((folder / HIT).exists())
        row.survived = int(not row.lost and not row.doubled)
    except Hung:
        row.hung = 1
    except Exception as error:
        row.notes.append(f"{type(error).__name__}: {error}")
    if row.well:
        shutil.rmtree(folder.parent)
    else:
        where = f"{trial.blow.when} {trial.blow.point}" if trial.blow else trial.how
        row.notes = [f"{trial.fault} ({trial.kind}, {where}): {note}" for note in row.notes or [
            f"lost {row.lost}, doubled {row.doubled}, hung {row.hung}"]]  # fmt: skip
        row.notes[-1] += f"; {folder}"
    return row


def in_turns(chosen: list[Trial]) -> list[Trial]:
    """The first of each fault, then the second, and so on."""
    places = Counter[str]()
    order = []
    for trial in chosen:
        places[trial.fault] += 1
        order.append(places[trial.fault])
    return [trial for _, trial in sorted(zip(order, chosen, strict=True), key=lambda pair: pair[0])]


def until(minutes: float, results: Any) -> Iterator[Row]:
    """Results as they come, for so long."""
    deadline = time.monotonic() + 60 * minutes
    while True:
        try:
            yield results.next(timeout=max(deadline - time.monotonic(), 0.1))
        except StopIteration:
            return
        except multiprocessing.TimeoutError:
            print(f"not all was tried in {minutes:g} minutes", file=sys.stderr)
            return


def end_commands(base: Path) -> None:
    """Ends every process that works in this folder."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if Path(os.readlink(link)).is_relative_to(base):
                os.kill(int(link.parent.name), signal.SIGKILL)


def table(rows: list[Row]) -> str:
    """As Markdown."""
    lines = ["| fault | tried | survived | lost | doubled | hung |", "|-|-|-|-|-|-|"]
    lines += [
        f"| {r.fault} | {r.tried} | {r.survived} | {r.lost} | {r.doubled} | {r.hung} |"
        for r in rows
    ]
    return "\n".join(lines)


def names() -> list[str]:
    """Every fault, in the table's order."""
    return list(dict.fromkeys(trial.fault for trial in trials(quick=False)))


def write_docs(rows: list[Row]) -> None:
    """The table of docs/resume.md."""
    page = ROOT / "docs/resume.md"
    before, mark, rest = page.read_text().partition("<!-- faults: `make faults` -->\n")
    _, end, after = rest.partition("<!-- end of faults -->")
    page.write_text(f"{before}{mark}{table(rows)}\n{end}{after}", encoding="utf-8")


def main() -> int:
    """Try them all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20.0)
    options = parser.parse_args()
    from tests.tiny import make_model

    base = Path(tempfile.mkdtemp(prefix="trireme-faults-"))
    make_model(base / "model", max_len=256)
    chosen = [t for t in trials(options.quick) if options.only in f"{t.fault} {t.kind} {t.blow}"]
    rows = {trial.fault: Row(trial.fault) for trial in chosen}
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, prepare, (str(base),)) as pool:
        for got in until(options.minutes, pool.imap_unordered(attempt, in_turns(chosen))):
            row = rows[got.fault]
            for name in ("tried", "survived", "lost", "doubled", "hung", "hit", "notes"):
                setattr(row, name, getattr(row, name) + getattr(got, name))
            for note in got.notes:
                print(note, file=sys.stderr, flush=True)
    end_commands(base)  # of trials that were not waited for
    for disk in re.findall(
        rf"^\S+ ({re.escape(str(base))}\S*)", Path("/proc/mounts").read_text(), re.M
    ):
        subprocess.check_call(["umount", "--lazy", disk])
    print(table(list(rows.values())))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows.values()], indent=2))
    if options.docs and sum(row.tried for row in rows.values()) == len(list(trials(quick=False))):
        write_docs(list(rows.values()))
    well = all(row.well for row in rows.values())
    if well:
        shutil.rmtree(base, ignore_errors=True)  # a command may be ending in it
    return 0 if well and rows else 1


if __name__ == "__main__":
    sys.exit(main())
