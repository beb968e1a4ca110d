"""Outside: refuses copies of experiences that belong to another job, or are two copies' place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trireme.buffer.owner import owner_of, refuse_other
from trireme.checkpoint.layout import RAW_COPY, JobFolder
from trireme.config import Plan, Problem

PIPELINE = "data_processor.experience_pipeline"
QUEUE = "buffer.trainer_input.experience_buffer.path"


def others_copies(plans: Sequence[Plan]) -> list[Problem]:
    """Return the copies of experiences in files that belong to another job: a run refuses to take
    them. One on a server is refused when the run opens it.
    """
    problems: list[Problem] = []
    for plan in plans:
        if not (copies := _outside(plan, _copies(plan))):
            continue
        folder = JobFolder(plan.job_dir)
        job, resumes = folder.root.resolve(), any(map(folder.is_full, folder.steps()))
        for key, copy_ in copies.items():
            if "://" in copy_:
                continue
            owner, filled = owner_of(Path(copy_))
            try:
                refuse_other(copy_, owner, filled, job=job, key=key, resumes=resumes)
            except ValueError as error:
                problems.append(Problem("", str(error), plan.stage_name))
    return problems


def shared_copies(plans: Sequence[Plan]) -> list[Problem]:
    """Return the copies of experiences that a stage would take from an earlier one: each begins
    anew, and removes what is there. The same for two copies of a stage, which replace each other's
    rows.
    """
    problems: list[Problem] = []
    writers: dict[str, str | None] = {}
    for plan in plans:
        copies = _copies(plan)
        if len(copies) > len({*copies.values()}):
            text = (
                f"is the place of {PIPELINE}.input_save_path as well, and each copy would replace "
                "the other's rows: expected a path for each"
            )
            problems.append(Problem(QUEUE, text, plan.stage_name))
        for key, copy_ in _outside(plan, copies).items():
            writer = writers.setdefault(copy_, plan.stage_name)
            if writer != plan.stage_name:
                text = (
                    f"is one place outside the folders of the stages {writer} and "
                    f"{plan.stage_name}, and the second would remove the first one's experiences: "
                    "expected a path for each"
                )
                problems.append(Problem(key, text))
    return problems


def _outside(plan: Plan, copies: dict[str, str]) -> dict[str, str]:
    """Return the copies that are outside the plan's folder."""
    folder = JobFolder(plan.job_dir).root.resolve() if copies else Path()
    return {
        key: place
        for key, place in copies.items()
        if "://" in place or not Path(place).is_relative_to(folder)
    }


def _copies(plan: Plan) -> dict[str, str]:
    """Return the copies of experiences that a plan's run takes, by key: files, and URLs of
    servers.
    """
    if plan.mode != "both" or "\0" in str(plan.job_dir):  # which is a problem of its own
        return {}
    copies: dict[str, str | None] = {}
    pipeline = plan.config.data_processor.experience_pipeline
    if pipeline.save_input:
        copies[f"{PIPELINE}.input_save_path"] = pipeline.input_save_path or RAW_COPY
    if plan.store.kind == "queue":
        copies[QUEUE] = plan.config.buffer.trainer_input.experience_buffer.path
    folder, out = JobFolder(plan.job_dir).buffer, dict[str, str]()
    for key, path in copies.items():
        place = (path or "").removeprefix("sqlite:///")
        if place and place != ":memory:" and "\0" not in place:
            out[key] = place if "://" in place else str((folder / place).resolve())
    return out
