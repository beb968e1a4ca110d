"""`trireme view`: shows the page over runs, or the trained and masked text as plain text.

Plain text shows rows of a run's SFT, DPO or cpt data set (only the tokenizer is loaded), or
experiences that a run has stored, found by the run's folder, its YAML, or their own address.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

from rich.text import Text

from trireme.buffer.blocks import TABLE, bytes_of
from trireme.checkpoint.layout import DATA_ROWS, EVALUATED, FAILED, JobFolder
from trireme.cli.samples import Sample, bracketed, of_data, of_experience
from trireme.config import ConfigError, Plan, load_config
from trireme.files import read_jsonl
from trireme.log import hide_passwords
from trireme.monitor.figures import spoken
from trireme.monitor.terminal import Terminal
from trireme.text import say

_LEGEND = "trained (green; yellow: with a weight other than 1), not trained, special tokens dim"
_BYTES = "experience_bytes"
SHOWN = {Path(name).stem for name in (EVALUATED, FAILED, DATA_ROWS)}
"""Files in `buffer/` without experiences of an explorer to train on."""


@dataclass(frozen=True)
class Found:
    """The samples to show."""

    samples: Iterator[Sample]
    cut: str | None = None
    """A description of the rows that their copy lacks."""


@dataclass(frozen=True)
class Wanted:
    """The choice of a store's experiences to show; the newest by default."""

    count: int = 3
    step: int | None = None
    """Of this explore step only."""
    order: Literal["newest", "best", "worst"] = "newest"
    """By reward, or by age."""
    raw: bool = False
    """Whether every token is shown, with the chat template's special tokens, even if messages are
    known."""


def view(
    config: Path | None,
    url: str | None,
    *,
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    table: str | None = None,
    tokenizer: str | None = None,
    wanted: Wanted | None = None,
    color: bool = True,
) -> int:
    """Print samples of a run's data set or of its stored experiences; the exit code is 1 for an
    error.
    """
    try:
        shown = _samples(folder, config, overrides, url, table, tokenizer, wanted or Wanted())
        samples, cut = list(shown.samples), shown.cut
    except (ValueError, OSError, ConfigError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "sqlalchemy":
            raise
        first = str(error).partition("\n")[0]
        message = hide_passwords(f"{url} is not a readable database: {first}")
        say(f"error: {message}", file=sys.stderr)
        return 1
    console = Terminal(soft_wrap=True, highlight=False, no_color=not color)
    if color:
        console.print(Text(_LEGEND, "italic"))
    if cut is not None:
        console.print(Text(f"note: {cut}", "italic"))
    for sample in samples:
        console.print(Text(f"--- {sample.title}", "bold cyan"))
        console.print(_coloured(sample) if color else Text(bracketed(sample)))
    return 0


def open_page(
    root: Path,
    host: str,
    port: int | None,
    key_file: Path | None,
    html: Path | None,
    *,
    open_browser: bool,
) -> int:
    """Serve the page over the runs below `root`, or write it to a file; returns the exit code."""
    from trireme.ext.page.serve import PageOptions, serve

    try:
        if html is not None:
            from trireme.ext.page.report import write_report

            say(f"written: {write_report(root, html)}")
            return 0
        return serve(PageOptions(root, host, port, key_file, open_browser))
    except (ValueError, OSError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 1


def _samples(
    folder: Path | None,
    config: Path | None,
    overrides: Sequence[str],
    url: str | None,
    table: str | None,
    tokenizer: str | None,
    wanted: Wanted,
) -> Found:
    """Return the samples of the first given one: a store, a run's folder, a run's YAML."""
    from trireme.buffer.limit import what_is_cut
    from trireme.launch.check import make_plans

    plans = make_plans(load_config(config, overrides)) if config else []
    plan = next((plan for plan in plans if plan.store.kind == "file"), (plans or [None])[-1])
    if url is None and plan is not None and plan.store.kind == "file":
        return Found(of_data(plan, wanted.count))
    if url is None and (folder is not None or plan is not None):
        job = folder or cast(Plan, plan).job_dir
        store = store_of(job)
        if store is None:
            return Found(of_data(_plan_of(job), wanted.count))
        url = str(store)
    if url is None:
        raise ValueError(
            "view needs the folder of a run, --config (its YAML), or --url (a database or .jsonl)"
        )
    path = url.removeprefix("sqlite:///")
    if "://" not in path and not Path(path).exists():
        raise ValueError(f"there is no {path}: has the run stored experiences yet?")
    cut = None if "://" in path else what_is_cut(Path(path))
    if path.endswith(".jsonl"):
        return Found(_of_lines(Path(path), wanted), cut)
    beside = None if "://" in path else tokenizer_of(Path(path).absolute().parents[1])
    named = tokenizer or beside or (plan.model_path if plan else None)
    url = url if "://" in url else f"sqlite:///{path}"
    return Found(_of_store(url, table, named, wanted), cut)


def store_of(job: Path) -> Path | None:
    """Return the newest database of experiences in a run's folder or its stages', else its
    lines.
    """
    if not job.is_dir():
        raise ValueError(f"there is no folder {job}: has the run begun?")
    for pattern in ("buffer/*.db", "*/buffer/*.db", "buffer/*.jsonl", "*/buffer/*.jsonl"):
        # explorer_output.db has the explorer's experiences before anything was left out
        files = [path for path in job.glob(pattern) if path.stem not in SHOWN]
        files.sort(key=lambda p: (p.stem == "explorer_output", _age(p)))
        if files:
            newest = max(files, key=lambda p: (_age(p.parent.parent), files.index(p)))
            return newest
    return None


def _age(path: Path) -> float:
    return path.stat().st_mtime


def tokenizer_of(job: Path) -> str | None:
    """Return the folder of a run's tokenizer: in its newest checkpoint, else where its
    model was.
    """
    folder = JobFolder(job)
    for step in reversed(folder.steps()):
        if (folder.hf_dir(step) / "tokenizer_config.json").is_file():
            return str(folder.hf_dir(step))
    if not folder.starts.is_file():
        return None
    return json.loads(folder.starts.read_text(encoding="utf-8"))["starts"][-1]["model"]["path"]


def _plan_of(job: Path) -> Plan:
    """Return the plan of the run that wrote a folder, for its first stage that has one."""
    from trireme.launch.check import make_plans

    for starts in (job / "run", *sorted(job.glob("*/run"))):
        if (starts / "starts.json").is_file():
            entries = json.loads((starts / "starts.json").read_text(encoding="utf-8"))["starts"]
            plan = make_plans(load_config(starts / entries[-1]["config_file"]))[0]
            if plan.store.kind == "file":
                return plan
    raise ValueError(
        f"{job} contains neither stored experiences (buffer/) nor a run that read data"
    )


def _in_turns(sample: Sample, messages: Sequence[Mapping[str, Any]]) -> Sample:
    """Show the sample with roles instead of the template's special tokens; all trained text stays.

    Unchanged without messages, and if the text of one is not found in the tokens' text (for a
    template that edits it).
    """
    if not messages:
        return sample
    text = "".join(part for part, *_ in sample.parts)
    weights = [weight for part, weight, _ in sample.parts for _ in part]
    trained = [place for place, weight in enumerate(weights) if weight]
    turns: list[tuple[str, int, int]] = []
    cursor = 0
    for message in messages:
        content = spoken({"content": message.get("content")})
        begin = text.find(content, cursor)
        if begin < 0:
            return sample
        end = begin + len(content)
        sampled = next((place for place in trained if place >= cursor), len(text))
        if message.get("role") == "assistant" and (not content or sampled < begin):
            begin, end = sampled, max(end, sampled)  # tool calls and thoughts are no content
        turns.append((message.get("role") or "?", begin, end))
        cursor = end
    shown: list[tuple[str, float, bool]] = []
    ends = [*(begin for _, begin, _ in turns[1:]), len(text)]
    for (role, begin, end), until in zip(turns, ends, strict=True):
        shown.append((f"{chr(10) if shown else ''}{role}: ", 0.0, True))
        kept = [place for place in range(begin, until) if place < end or weights[place]]
        for weight, places in groupby(kept, key=weights.__getitem__):
            shown.append(("".join(text[place] for place in places), weight, False))
    return dataclasses.replace(sample, parts=shown)


def _of_store(url: str, table: str | None, name: str | None, wanted: Wanted) -> Iterator[Sample]:
    """Yield experiences of a database. Raises ValueError for a missing table or step."""
    from sqlalchemy import create_engine, inspect

    from trireme.serialize import Damaged, decode

    engine = create_engine(url)
    try:
        inspected = inspect(engine)
        columns = {t: inspected.get_columns(t) for t in inspected.get_table_names()}
        tables = [
            t
            for t, table_columns in columns.items()
            if any(c["name"] == _BYTES for c in table_columns)
        ]
        if not tables or (table is not None and table not in tables):
            what = f"no table '{table}'" if table else "no experiences"
            raise ValueError(f"{url} has {what}: it has {', '.join(tables) or 'none'}")
        table = table or tables[0]
        chosen = engine.dialect.identifier_preparer.quote(table)
        data = bytes_of(columns) if table == TABLE else _BYTES
        with engine.connect() as connection:
            payloads = _payloads(connection, chosen, data, wanted)
    finally:
        engine.dispose()
    tokenizer = None
    if name is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    for row, eid, payload in payloads:
        try:
            # of pictures only the places are shown
            experiences = decode(bytes(payload), lambda digest: b"")
        except Damaged as error:
            yield _of_texts(f"row {row} of table {table} is damaged ({error})", None, None)
            continue
        for e in experiences:
            if e.eid.uid != eid:  # of the same block
                continue
            title = f"{e.eid.uid}, reward {e.reward}, model version {e.version}"
            if tokenizer is not None:
                samples = of_experience(title, e, tokenizer)
                messages = [] if wanted.raw else e.messages or []
                yield from (_in_turns(sample, messages) for sample in samples)
            else:
                yield _of_texts(title, e.prompt_text, e.response_text)


def _payloads(connection: Any, table: str, data: str, wanted: Wanted) -> list[tuple[int, str, Any]]:
    """Return the rows' keys, ids and bytes, which `data` asks for, in the requested order. Raises
    ValueError if a step has none.
    """
    from sqlalchemy import text

    order = {"newest": "id DESC", "best": "reward DESC, id DESC", "worst": "reward, id DESC"}
    where = [] if wanted.step is None else ["batch = :step"]
    where += [] if wanted.order == "newest" else ["reward IS NOT NULL"]
    query = (
        f"SELECT id, msg_id, {data} FROM {table} {'WHERE ' * bool(where)}{' AND '.join(where)} "
        f"ORDER BY {order[wanted.order]} LIMIT :count"
    )
    values = {"count": wanted.count} | ({} if wanted.step is None else {"step": wanted.step})
    payloads = [(row[0], row[1], row[2]) for row in connection.execute(text(query), values)]
    if not payloads:
        first, last = connection.execute(text(f"SELECT min(batch), max(batch) FROM {table}")).one()
        raise ValueError(_none_there(wanted, first, last))
    return payloads


def _none_there(wanted: Wanted, first: Any, last: Any) -> str:
    what = "" if wanted.step is None else f" of step {wanted.step}"
    there = "it is empty" if first is None else f"it has steps {first} to {last}"
    return f"the store has no experiences{what}: {there}"


def _of_lines(path: Path, wanted: Wanted) -> Iterator[Sample]:
    """Yield the lines of a run's `experience_buffer.jsonl`."""
    rows = read_jsonl(path)[::-1]
    if any(not isinstance(row, dict) or "eid" not in row for row in rows):
        raise ValueError(f"{path} has a line that no run stored: use --config to see a data set")
    lines = [row for row in rows if wanted.step in (None, row.get("step"))]
    if wanted.order != "newest":
        lines = [row for row in lines if row.get("reward") is not None]
        lines.sort(key=lambda row: row["reward"], reverse=wanted.order == "best")
    if not lines:
        steps = sorted(row.get("step", 0) for row in rows) or [None]
        raise ValueError(_none_there(wanted, steps[0], steps[-1]))
    for row in lines[: wanted.count]:
        title = f"{row.get('eid')}, reward {row.get('reward')}"
        yield _of_texts(title, row.get("prompt"), row.get("response"))


def _of_texts(title: str, prompt: str | None, response: str | None) -> Sample:
    return Sample(title, [(prompt or "", 0.0, False), (response or "", 1.0, False)])


def _coloured(sample: Sample) -> Text:
    out = Text()
    for text, weight, dim in sample.parts:
        style = "dim" if dim else "" if not weight else "green" if weight == 1 else "yellow"
        out.append(text, style)
        if weight not in (0, 1):
            out.append(f"(x{weight:g})", "yellow italic")
    return out
