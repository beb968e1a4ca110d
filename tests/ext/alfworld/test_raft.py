"""Only episodes that do their task are trained, and a second one is trained without its note."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.ext.alfworld.test_workflow import Room
from tests.model.fake import TOKENIZER, engine_of, make
from trireme.experience import Experience
from trireme.ext.alfworld.raft import NOTE, REFLECT
from trireme.ext.alfworld.workflow import SYSTEM_PROMPT
from trireme.ext.environments.workflow import HouseholdWorkflow
from trireme.model.model import Model
from trireme.task import Task
from trireme.workflows.workflow import resolve

LOOK, WAIT = "<action>look</action>", "<action>wait</action>"


def play(
    name: str, replies: list[str], monkeypatch: pytest.MonkeyPatch, *, steps: int = 2, **task: Any
) -> tuple[list[Experience], Model]:
    code = resolve(name).code
    monkeypatch.setattr(code, "make_env", lambda self: Room())
    if issubclass(code, HouseholdWorkflow):
        monkeypatch.setattr(code, "parse_action", lambda self, reply: reply[8:-9])
    model = make(replies)

    async def main() -> list[Experience]:
        given = Task({"prompt": "1"}, workflow_args={"max_env_steps": steps}, **task)
        return await resolve(name).call(given, model, 1, 0)

    return asyncio.run(main()), model


@pytest.mark.parametrize("name", ["RAFT_alfworld_workflow", "RAFT_household_workflow"])
def test_what_fails_is_not_trained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done, _ = play(name, [LOOK, LOOK], monkeypatch)
    assert all(e.reward == 1.0 and e.metrics["success"] == 1.0 for e in done)
    assert sum(e.trained_tokens for e in done) == 2 * (len(LOOK) + 1)
    failed, _ = play(name, [LOOK, WAIT], monkeypatch)
    assert all(e.reward is not None and e.reward <= 0 for e in failed)
    assert [e.trained_tokens for e in failed] == [0] * len(failed)
    assert all(e.metrics["success"] == 0.0 for e in failed)


def test_the_second_episode_is_trained_without_its_note(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [LOOK, WAIT, "I shall look.", LOOK, LOOK]
    [e], model = play("RAFT_reflect_alfworld_workflow", replies, monkeypatch)
    engine = engine_of(model)
    asked = [engine.tokenizer.decode(prompt) for prompt in engine.prompts]
    assert REFLECT in asked[2] and NOTE.format("I shall look.") in asked[3]
    [plain], _ = play("RAFT_alfworld_workflow", [LOOK, LOOK], monkeypatch)
    assert e.tokens.tolist() == plain.tokens.tolist() and e.mask.tolist() == plain.mask.tolist()
    assert "note" not in TOKENIZER.decode(e.tokens.tolist()).removeprefix(SYSTEM_PROMPT)
    assert e.reward == 1.0 and e.metrics["first_success"] == 0.0 and e.metrics["reflected"] == 1.0
    assert e.versions is not None and e.logprobs is not None and e.sampler_logprobs is None
    # the fake engine scores every token -temperature, whatever it said when it sampled
    assert set(e.logprobs[e.versions >= 0].tolist()) == {-e.temperature}
    assert e.logprobs[e.versions < 0].count_nonzero() == 0


def test_step_by_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [LOOK, WAIT, "I shall look.", LOOK, LOOK]
    found, _ = play("RAFT_reflect_household_workflow", replies, monkeypatch)
    plain, _ = play("RAFT_household_workflow", [LOOK, LOOK], monkeypatch)
    assert [e.tokens.tolist() for e in found] == [e.tokens.tolist() for e in plain]
    assert [e.mask.tolist() for e in found] == [e.mask.tolist() for e in plain]
    assert [e.info["step_reward"] for e in found] == [0.0, 1.0]


def test_no_second_episode_where_the_first_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    [e], _ = play("RAFT_reflect_alfworld_workflow", [LOOK, LOOK], monkeypatch)
    assert e.metrics["first_success"] == 1.0 and e.trained_tokens
    [e], _ = play("RAFT_reflect_alfworld_workflow", [LOOK, WAIT], monkeypatch, is_eval=True)
    assert e.metrics["reflected"] == 0.0 and e.reward == -0.1
    [e], _ = play("RAFT_reflect_alfworld_workflow", [LOOK, WAIT, "  ", LOOK, LOOK], monkeypatch)
    assert e.metrics["reflected"] == 0.0 and e.trained_tokens == 0
    [e], _ = play("RAFT_reflect_alfworld_workflow", [WAIT] * 5, monkeypatch)
    assert e.trained_tokens == 0 and e.metrics["reflected"] == 1.0
