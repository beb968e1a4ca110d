"""First rows: prints the lengths of a plan's rows, and the asked or trained text of the first.

For `trireme check`: some rows of each data set are encoded by the model's own tokenizer, if it is
on this machine, for some seconds at most; launch/prompts.py encodes prompts, for a run too. The
prompts of a user's own workflow are not known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from trireme.cli.samples import bracketed, of_data
from trireme.config import Plan
from trireme.config.lookup import located
from trireme.launch.complete import Completed
from trireme.launch.prompts import (
    ROWS,
    SECONDS,
    Prompts,
    prompt_notes,
    prompt_problems,
)
from trireme.monitor.figures import in_one_line

SHOWN = 300
"""Most characters of a row."""

Lines = tuple[list[tuple[str, str]], list[str]]
"""Topic and text of lines to print, and problems."""


def first_rows(plan: Plan, completed: Completed) -> Lines:
    """Return lines and problems of the first rows. A plan whose model another stage makes is
    skipped.
    """
    if plan.mode == "serve" or plan.api or located(plan.model_path, "models") is None:
        return [], []
    lines, problems = _of_data(plan) if plan.store.kind == "file" else ([], [])
    encoded = completed.encoded
    if encoded.unread:
        lines.append(unread(encoded.unread))
    for name, prompts in encoded.prompts:
        said = _of_prompts(plan, name, prompts)
        lines += [line for line in said if line[0] != "warning" or line not in lines]
    too_long = prompt_problems(plan, encoded.prompts)
    problems += [str(replace(problem, stage=plan.stage_name)) for problem in too_long]
    return lines, problems


def unread(why: str) -> tuple[str, str]:
    """Return the line that says why nothing was encoded."""
    return "warning", f"no row was encoded: {why.splitlines()[0]}"


def _of_prompts(plan: Plan, name: str, prompts: Prompts) -> list[tuple[str, str]]:
    lines = [("prompts", f"{name}: {_range(prompts.sizes)}"), ("first prompt", _end(prompts.first))]
    if prompts.drops_tools:
        lines.append(("warning", f"{name}: the chat template writes nothing of the rows' tools"))
    return lines + [("warning", note) for note in prompt_notes(plan, name, prompts)]


def _of_data(plan: Plan) -> Lines:
    deadline = time.monotonic() + SECONDS
    samples = []
    for sample in of_data(plan, ROWS):
        samples.append(sample)
        if time.monotonic() > deadline:
            break
    sizes = [sample.tokens for sample in samples if sample.parts]
    untrained = sum(sample.untrained for sample in samples)
    lost = len(samples) - len(sizes) - untrained
    why = "the weight of every reply is 0, or the mask is"
    nothing = f"of the first {len(samples)} rows train nothing: {why}"
    if not sizes and not lost:
        return [], [f"all {nothing}"]
    if not sizes:
        return [], [
            f"all of the first {len(samples)} rows leave nothing to train within "
            f"model.max_model_len ({plan.lengths.max_model_len}): expected a larger one, or "
            "shorter rows"
        ]
    shown = in_one_line(bracketed(next(s for s in samples if s.parts)), SHOWN)
    lines = [("rows", _range(sizes)), ("trained", f"[[in brackets]] {shown}")]
    cut = sum(size >= plan.lengths.max_model_len for size in sizes)
    if lost or cut:
        text = f"{lost} of the first {len(samples)} rows are left out, as too long, and {cut} cut"
        lines.append(("warning", f"{text} at model.max_model_len ({plan.lengths.max_model_len})"))
    if untrained:
        lines.append(("warning", f"{untrained} {nothing}"))
    return lines, []


def _range(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} encoded, {min(sizes)} to {max(sizes)} tokens"


def _end(prompt: str) -> str:
    return in_one_line("… " * (len(prompt) > 120) + prompt[-120:], 160)
