"""`trireme view`: what a model is trained on, token for token, with what is masked.

Rows of a run's SFT, DPO or cpt data set (only the tokenizer is loaded), or experiences that a run
has stored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from trireme.config import ConfigError, Plan, load_config, make_plans
from trireme.log import hide_passwords

_LEGEND = "trained (green; yellow: with another weight than 1), not trained, its special tokens dim"
_BYTES = "experience_bytes"


@dataclass
class Sample:
    """One experience to be shown."""

    title: str
    parts: list[tuple[str, float, bool]] = field(default_factory=list)
    """Text, its weight (0: not trained), and whether it is special tokens alone."""


def view(
    config: Path | None,
    url: str | None,
    *,
    overrides: Sequence[str] = (),
    table: str | None = None,
    tokenizer: str | None = None,
    count: int = 3,
    color: bool = True,
) -> int:
    """Print `count` samples of a run's data set or of a store; the exit code is 1 for an error."""
    try:
        plan = _plan(config, overrides) if config else None
        samples = list(_samples(plan, url, table, tokenizer, count))
    except (ValueError, OSError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "sqlalchemy":
            raise
        first = str(error).partition("\n")[0]
        told = hide_passwords(f"{url} is no database to read: {first}")
        print(f"error: {told}", file=sys.stderr)
        return 1
    console = Console(soft_wrap=True, highlight=False, no_color=not color)
    if color:
        console.print(Text(_LEGEND, "italic"))
    for sample in samples:
        console.print(Text(f"--- {sample.title}", "bold cyan"))
        console.print(_coloured(sample) if color else Text(_bracketed(sample)))
    return 0


def _plan(config: Path, overrides: Sequence[str]) -> Plan:
    """The first stage that reads a data set, else the last one."""
    plans = make_plans(load_config(config, overrides))
    return next((plan for plan in plans if plan.buffer_type == "file"), plans[-1])


def _samples(
    plan: Plan | None, url: str | None, table: str | None, tokenizer: str | None, count: int
) -> Iterator[Sample]:
    if plan is not None and url is None and plan.buffer_type == "file":
        return _of_data(plan, count)
    if url is None and plan is not None:
        url = str(plan.job_dir / "buffer" / "explorer_output.db")
    if url is None:
        raise ValueError("view needs --config (a run), or --url (a database or a .jsonl file)")
    path = url.removeprefix("sqlite:///")
    if "://" not in path and not Path(path).exists():
        raise ValueError(f"there is no {path}: has the run stored experiences yet?")
    if path.endswith(".jsonl"):
        return _of_lines(Path(path), count)
    named = tokenizer or (plan.model_path if plan else None)
    return _of_store(url if "://" in url else f"sqlite:///{path}", table, named, count)


def _of_data(plan: Plan, count: int) -> Iterator[Sample]:
    """Rows of the plan's data set, as they are trained on."""
    import dataclasses

    from trireme.data.kinds import FORMATS
    from trireme.data.rows import load_rows
    from trireme.experience import EID
    from trireme.launch.parts.text import make_text

    config = plan.config.buffer.trainer_input.experience_buffer
    text = make_text(plan, plan.model_path)
    rows = load_rows(plan.buffer_path, config.subset_name, config.split, on_error=config.on_error)
    form = FORMATS[plan.config.algorithm.algorithm_type](
        rows,
        text.tokenizer,
        max_model_len=plan.max_model_len,
        format_args=dataclasses.asdict(config.format),
        chat_template=text.template,
        enable_thinking=plan.config.model.enable_thinking,
        on_error=config.on_error,
    )
    for index in range(min(count, len(form))):
        experience = form(index, eid=EID(0, index))
        if experience is None:
            yield Sample(f"row {index}: left out, nothing of it is trained")
            continue
        yield from _of_experience(f"row {index}", experience, text.tokenizer)


def _of_experience(title: str, e: Any, tokenizer: Any) -> Iterator[Sample]:
    """One sample, or of a pair one for each reply."""
    if e.chosen is not None and e.rejected is not None:
        for name, reply in (("chosen", e.chosen), ("rejected", e.rejected)):
            ids, weights = [*e.tokens.tolist(), *reply.tolist()], [0.0] * len(e.tokens)
            weights += [1.0] * len(reply)
            yield _sample(f"{title}, {name}", ids, weights, tokenizer)
        return
    weights = e.mask.float() if e.loss_weight is None else e.loss_weight * e.mask
    yield _sample(title, e.tokens.tolist(), weights.tolist(), tokenizer)


def _sample(title: str, ids: Sequence[int], weights: Sequence[float], tokenizer: Any) -> Sample:
    special = set(tokenizer.all_special_ids)
    kinds = [(weight, not weight and token in special)
             for token, weight in zip(ids, weights, strict=True)]  # fmt: skip
    parts = [
        (tokenizer.decode([ids[place] for place in places]), weight, dim)
        for (weight, dim), places in groupby(range(len(ids)), key=lambda place: kinds[place])
    ]
    trained = sum(weight != 0 for weight in weights)
    return Sample(f"{title}: {len(ids)} tokens, {trained} trained", parts)


def _of_store(url: str, table: str | None, name: str | None, count: int) -> Iterator[Sample]:
    """The newest experiences of a database. Raises ValueError for a table that it has not."""
    from sqlalchemy import create_engine, inspect, text

    from trireme.serialize import decode

    engine = create_engine(url)
    try:
        inspected = inspect(engine)
        columns = {t: inspected.get_columns(t) for t in inspected.get_table_names()}
        tables = [t for t, own in columns.items() if any(c["name"] == _BYTES for c in own)]
        if not tables or (table is not None and table not in tables):
            what = f"no table '{table}'" if table else "no experiences"
            raise ValueError(f"{url} has {what}: it has {', '.join(tables) or 'none'}")
        chosen = engine.dialect.identifier_preparer.quote(table or tables[0])
        with engine.connect() as connection:
            query = text(f"SELECT {_BYTES} FROM {chosen} ORDER BY id DESC LIMIT :count")
            found = [row[0] for row in connection.execute(query, {"count": count})]
    finally:
        engine.dispose()
    tokenizer = None
    if name is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    for payload in found:
        for e in decode(bytes(payload)):
            title = f"{e.eid.uid}, reward {e.reward}, model version {e.version}"
            if tokenizer is not None:
                yield from _of_experience(title, e, tokenizer)
            else:
                yield _of_texts(title, e.prompt_text, e.response_text)


def _of_lines(path: Path, count: int) -> Iterator[Sample]:
    """The newest lines of a run's `experience_buffer.jsonl`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for line in lines[: -count - 1 : -1]:
        row = json.loads(line)
        if not isinstance(row, dict) or "eid" not in row:
            raise ValueError(f"{path} has a line that no run stored: to see a data set, --config")
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


def _bracketed(sample: Sample) -> str:
    """What is trained stands in double brackets, with its weight where that is not 1."""
    out = []
    for text, weight, _ in sample.parts:
        told = f"(x{weight:g})" if weight not in (0, 1) else ""
        out.append(f"[[{text}]]{told}" if weight else text)
    return "".join(out)
