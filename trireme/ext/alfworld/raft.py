"""RAFT: trains only those episodes that reach their goal (arXiv:2304.06767).

- No token of a failed episode is trained, whatever the algorithm; its reward is unchanged, so that
  the curve stays true.
- The `reflect` workflows ask the model what went wrong in a failed episode, and play it once more
  with that note before the first observation (arXiv:2303.11366). The second episode is trained
  without the note: the sampled ids, with the log-probabilities that they have without it.
- Evaluation plays one episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from trireme.experience import Experience
from trireme.ext.alfworld.workflow import OPTIONS, AlfworldWorkflow
from trireme.ext.environments.workflow import HouseholdWorkflow
from trireme.model.model import Model
from trireme.workflows.episode import EpisodeWorkflow

REFLECT = (
    "The task was not done. In a few sentences: what went wrong, and what will you do differently "
    "from the first action on? Name no action now."
)
NOTE = "An earlier attempt failed. Your note on it: {}\n\n"
Play = Callable[[str], Awaitable[list[Experience]]]
"""Plays an episode with this text before its first observation."""


class RaftAlfworldWorkflow(AlfworldWorkflow):
    """The `alfworld_workflow` of which only successful episodes are trained."""

    max_env_steps = 50
    workflow_options = OPTIONS

    async def _play(self, env: Any, call: Callable[..., Any], told: str = "") -> list[Experience]:
        return successes(await super()._play(env, call, told))


class RaftReflectAlfworldWorkflow(AlfworldWorkflow):
    """The `RAFT_alfworld_workflow`, in which a failed episode is repeated after a reflection."""

    max_env_steps = 50
    workflow_options = OPTIONS

    async def _play(self, env: Any, call: Callable[..., Any], told: str = "") -> list[Experience]:
        return await with_reflection(self, partial(super()._play, env, call))


class RaftHouseholdWorkflow(HouseholdWorkflow):
    """The `household_workflow` of which only successful episodes are trained."""

    workflow_options = HouseholdWorkflow.workflow_options

    async def _play(self, env: Any, call: Callable[..., Any], told: str = "") -> list[Experience]:
        return successes(await super()._play(env, call, told))


class RaftReflectHouseholdWorkflow(HouseholdWorkflow):
    """The `RAFT_household_workflow`, in which a failed episode is repeated after a reflection."""

    workflow_options = HouseholdWorkflow.workflow_options

    async def _play(self, env: Any, call: Callable[..., Any], told: str = "") -> list[Experience]:
        return await with_reflection(self, partial(super()._play, env, call))


def succeeded(episode: list[Experience]) -> bool:
    """Return whether the environment ended the episode with a reward of 1."""
    return all(e.metrics["env_done"] == 1.0 and (e.reward or 0.0) >= 1.0 for e in episode)


def successes(episode: list[Experience]) -> list[Experience]:
    """Return the episode; if it failed, nothing of it is trained."""
    success = succeeded(episode)
    for experience in episode:
        experience.metrics["success"] = float(success)
        if not success:
            experience.mask = torch.zeros_like(experience.mask)
    return episode


async def with_reflection(workflow: EpisodeWorkflow, play: Play) -> list[Experience]:
    """Play one episode or, if it fails, a second one with the model's note on the first.

    There is no second one in evaluation, nor if the first left no room to think about it.
    """
    model = workflow.model.model
    first = await play("")
    success = succeeded(first)
    again = not success and not workflow.is_eval and not first[0].metrics["env_no_room"]
    noted = None
    if again:
        begun = model.recorder.take()[-1].conversation
        noted = await model.chat([*begun, {"role": "user", "content": REFLECT}])
        model.recorder.take()
    episode = first
    if noted is not None and noted.text.strip():
        note = NOTE.format(noted.text.strip())
        second = await play(note)
        episode = await without_note(model, note, second, per_call=workflow.per_step)
    reflected = float(episode is not first)  # a blank note is no reflection: nothing was repeated
    for experience in episode:
        experience.metrics |= {"first_success": float(success), "reflected": reflected}
    return successes(episode)


async def without_note(
    model: Model, note: str, episode: list[Experience], *, per_call: bool
) -> list[Experience]:
    """Return the episode as if the note had not been there: the same replies to the same
    observations.
    """
    clean = model.fork()
    for call in model.recorder.fresh():
        messages = [{**m, "content": m["content"].removeprefix(note)} for m in call.messages or ()]
        known = clean.recorder.by_messages(messages, None)
        begun = known.recorded() if known else None
        prompt = clean.chat_tokens.prompt(messages, None, begun, most=model.max_model_len)
        parent = known if prompt.extends else None
        clean.recorder.add(
            replace(call, parent=parent, inserted=prompt.ids, messages=messages, extended=False)
        )
    told = episode[0]
    names = ("env_rounds", "env_done", "env_no_room", "actual_env_steps")
    metrics = {name: told.metrics[name] for name in names}
    experiences = clean.experiences(told.reward, per_call=per_call, **metrics)
    for experience in experiences:
        await _measure(model, experience)
    if per_call and len(episode) == len(experiences):
        for experience, lived in zip(experiences, episode, strict=True):
            experience.info |= lived.info
    return experiences


async def _measure(model: Model, experience: Experience) -> None:
    """Set sampled tokens' log-probabilities to those after the text that they now follow."""
    if not experience.trained_tokens:
        return
    logprobs = await model.logprobs(experience.tokens.tolist(), experience.temperature)
    measured = torch.tensor(logprobs, dtype=torch.float32)
    assert experience.versions is not None
    experience.logprobs = torch.where(experience.versions >= 0, measured, 0.0)
    experience.sampler_logprobs = None
