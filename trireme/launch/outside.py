"""Outside: refuses copies of experiences outside a run's folder that belong to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trireme.buffer.owner import owner_of, refuse_other
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan, Problem


def others_copies(plans: Sequence[Plan]) -> list[Problem]:
    """Return the copies of experiences in files that belong to another job: a run refuses to take
    them. One on a server is refused when the run opens it.
    """
    problems: list[Problem] = []
    for plan in plans:
        folder = JobFolder(plan.job_dir)
        job, resumes = folder.root.resolve(), any(map(folder.is_full, folder.steps()))
        for key, copy_ in _outside_copies(plan).items():
            owner, filled = (None, False) if "://" in copy_ else owner_of(Path(copy_))
            try:
                refuse_other(copy_, owner, filled, job=job, key=key, resumes=resumes)
            except ValueError as error:
                problems.append(Problem("", str(error), plan.stage_name))
    return problems


def shared_copies(plans: Sequence[Plan]) -> list[Problem]:
    """Return the copies of experiences that a stage would take from an earlier one: each begins
    anew, and removes what is there.
    """
    problems: list[Problem] = []
    writers: dict[str, str | None] = {}
    for plan in plans:
        for key, copy_ in _outside_copies(plan).items():
            writer = writers.setdefault(copy_, plan.stage_name)
            if writer != plan.stage_name:
                text = (
                    f"is one place outside the folders of the stages {writer} and "
                    f"{plan.stage_name}, and the second would remove the first one's experiences: "
                    "expected a path for each"
                )
                problems.append(Problem(key, text))
    return problems


def _outside_copies(plan: Plan) -> dict[str, str]:
    """Return the copies of experiences that a plan's run takes outside its folder, by key: files,
    and URLs of servers.
    """
    if plan.mode != "both":
        return {}
    copies: dict[str, str | None] = {}
    pipeline = plan.config.data_processor.experience_pipeline
    if pipeline.save_input:
        key = "data_processor.experience_pipeline.input_save_path"
        copies[key] = pipeline.input_save_path
    if plan.store.kind == "queue":
        key = "buffer.trainer_input.experience_buffer.path"
        copies[key] = plan.config.buffer.trainer_input.experience_buffer.path
    folder = JobFolder(plan.job_dir)
    out: dict[str, str] = {}
    for key, path in copies.items():
        place = (path or "").removeprefix("sqlite:///")
        if "://" in place:
            out[key] = place
        elif place and place != ":memory:":
            file = (folder.buffer / place).resolve()
            if not file.is_relative_to(folder.root.resolve()):
                out[key] = str(file)
    return out
