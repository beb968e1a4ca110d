"""Owner: the job whose copy of experiences it is, where the copy is outside the job's folder.

A job removes from its copy what an earlier attempt wrote, and replaces equal ids: a second job with
the same path would delete the first one's experiences.
"""

from __future__ import annotations

from pathlib import Path


def refuse_other(
    copy_: str, owner: str | None, filled: bool, *, job: Path, key: str, resumes: bool
) -> None:
    """Raise ValueError if the copy, named by `key` of the YAML, is not that of the job in folder
    `job`, resolved. `owner` is the folder that the copy names, None if it names none; `filled`: it
    has experiences.

    A job that resumes owns a copy without an owner, as earlier versions left it, and one whose
    owner's folder is gone: its own was renamed.
    """
    if not (owner or filled) or (owner and Path(owner).resolve() == job):
        return
    if resumes and (owner is None or not Path(owner).is_dir()):
        return
    whose = f"is the copy of the job in {owner}" if owner else "has experiences but names no job"
    raise ValueError(
        f"{key}: {copy_} {whose}, and this run, in {job}, would remove them: expected a path that "
        "no other job has, or that copy moved away"
    )
