"""A plug-in as an ms-swift user has it, with his flags, by the real command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import run, small_config

PLUGIN = '''
import asyncio
import os
import subprocess
from typing import Dict, List

from swift.llm import PtEngine, RequestConfig, RolloutInferRequest, Template, to_device
from swift.llm.infer.protocol import ChatCompletionResponse, ChatCompletionResponseChoice
from swift.llm.template.utils import ContextType
from swift.plugin import ORM, AsyncORM, orms, rm_plugins
from swift.plugin.context_manager import ContextManager, context_managers
from swift.plugin.env import Env, envs
from swift.plugin.loss_scale.loss_scale import LossScale, loss_scale_map
from swift.plugin.multi_turn import MultiTurnScheduler, multi_turns
from swift.plugin.rm_plugin import DefaultRMPlugin
from swift.utils import get_logger

logger = get_logger()


class Again:
    """Without a base, and with an `async def` of its own."""

    def __init__(self, max_turns=None, *args, **kwargs):
        self.max_turns = max_turns

    async def step(self, infer_request, response_choice, current_turn: int) -> Dict:
        infer_request.messages.append({'role': 'user', 'content': 'Again.'})
        return {'infer_request': infer_request}

    def check_finished(self, infer_request, result, current_turn: int) -> bool:
        return current_turn >= self.max_turns  # also where a reply is cut


class Letters(ORM):
    """The keyword arguments of the documents, and no others."""

    def __call__(self, completions, question, solution, messages, is_truncated) -> List[float]:
        assert [len(m) for m in messages] == [4] * len(completions)
        logger.info('judged %d', len(completions))
        return [sum(c.isalpha() for c in text) / 8 for text in completions]


class Trajectories(ORM):

    def __init__(self, args=None, **kwargs):
        super().__init__(args)
        from swift.rewards.orm import MathAccuracy
        self.accurate = MathAccuracy()

    def __call__(self, completions, **kwargs) -> List[float]:
        found = []
        for one in kwargs.get('request_id'):
            last = kwargs.get('trajectory_inputs')[one][-1]
            found += self.accurate([last['messages'][-1]['content']], [last['solution']])
        return found


class Waits(AsyncORM):
    """Reads its environment, and leaves a process behind whose parent has ended."""

    address = os.environ['OF_THE_RUNNERS']

    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        assert os.environ['OF_THE_RUNNERS'] == self.address == 'here'
        subprocess.run('setsid sleep 67 > /dev/null 2>&1 &', shell=True, check=True)
        return [0.0 for _ in completions]


class Brief(ORM):

    def __init__(self, args=None, **kwargs):
        super().__init__(args)

    def __call__(self, completions, **kwargs):
        return [float(len(c) < 5) for c in completions]


class LastTurn(LossScale):

    def get_loss_scale(self, context: str, context_type: ContextType, is_last_round: bool, **rest):
        if context_type == ContextType.RESPONSE:
            return [context], [float(is_last_round)]
        return super().get_loss_scale(context, context_type, is_last_round)


class OwnModel(DefaultRMPlugin):

    def __init__(self, model, template):
        super().__init__(model, template)


for name, scheduler in {'again': Again}.items():
    multi_turns[name] = scheduler
orms['letters'], orms['own_' + 'brief'] = Letters, Brief
orms.update({'trajectories': Trajectories, 'waits': Waits})
assert {'accuracy', 'toolbench', 'waits'} <= set(orms) and orms.get('none', None) is None
rm_plugins['own_model'] = OwnModel
loss_scale_map['last_turn'] = LastTurn
'''
FLAGS = (
    *("--external_plugins", "plugin.py", "--multi_turn_scheduler", "again", "--max_turns", "2"),
    *("--reward_funcs", "letters", "own_brief", "trajectories", "waits", "toolbench"),
    *("--reward_weights", "1", "0.5", "1", "1", "1"),
    *("--loss_scale", "last_turn"),
)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    made = small_config(tmp_path)
    made["buffer"]["total_steps"] = 1
    made["explorer"]["env_vars"] = {"OF_THE_RUNNERS": "here"}
    return made


def test_a_plug_in_for_ms_swift_trains_as_it_is(tmp_path: Path, config: dict[str, Any]) -> None:
    done = run(tmp_path, config, *FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    job = tmp_path / "checkpoints" / "tests" / "job"
    lines = (job / "buffer" / "experience_buffer.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        assert "Again." in row["prompt"] + row["response"]
        assert row["trained_tokens"] <= 9  # of two turns the last alone
    assert "processes that rollouts had left running: sleep 67 (" in done.stdout
    assert "judged 4" in (job / "log" / "launcher.log").read_text()


def test_what_is_wrong_with_a_plug_in_is_said_before_what_it_would_have_registered(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN.replace("rm_plugins\n", "rm_plug\n", 1))
    done = run(tmp_path, config, *FLAGS)
    assert done.returncode == 2
    assert "cannot import name 'rm_plug'" in done.stderr.splitlines()[0]
    assert "rm_plugins" in done.stderr.splitlines()[0]  # what there is
    assert "unknown reward" not in done.stderr
