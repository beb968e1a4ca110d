"""Workflows registered as the seeds do it: in trinity/common/workflows/__init__.py."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.e2e.job import ROOT, command, environment, small_config
from tests.limits import HANG_S

MINE = """
from typing import List

from trinity.common.experience import Experience
from trinity.common.workflows.envs.alfworld.alfworld_workflow import (
    AlfworldWorkflow,
    format_observation,
    parse_action,
)
from trinity.common.workflows.step_wise_workflow import StepWiseAlfworldWorkflow
from trinity.common.workflows.workflow import WORKFLOWS, MultiTurnWorkflow


class Room:
    def reset(self):
        self.left = 2
        return "a room", {}

    def step(self, action):
        self.left -= 1
        return "a room", 0.25, self.left == 0, {}

    def close(self):
        self.left = None


@WORKFLOWS.register_module("my_alfworld")
class MyAlfworld(AlfworldWorkflow):
    def make_env(self):
        return Room()

    def generate_env_inference_samples(self, env, rollout_num) -> List[Experience]:
        assert isinstance(self, MultiTurnWorkflow)
        experience_list = []
        for i in range(rollout_num):
            observation, info = env.reset()
            memory = [{"role": "system", "content": "play"}]
            for r in range(self.max_env_steps):
                memory = memory + [{"role": "user", "content": format_observation(observation)}]
                response_text = self.get_model_response_text(memory)
                memory.append({"role": "assistant", "content": response_text})
                observation, reward, done, info = env.step(parse_action(response_text))
                if done:
                    break
            experience_list.append(
                self.process_messages_to_experience(memory, 0.75, {"env_rounds": r})
            )
        return experience_list


class MyStepWise(StepWiseAlfworldWorkflow):
    def open(self):
        self.env, self.final_reward, self.done = Room(), 0.5, False
        self.observation, self.memory, self.no_room, self._rewards = self.env.reset()[0], [], 0, []

    def step(self, step_num: int) -> bool:
        self.memory.append({"role": "user", "content": format_observation(self.observation)})
        responses = self.model.chat(self.memory)
        self.memory.append({"role": "assistant", "content": responses[0].response_text})
        observation, reward, done, info = self.env.step("look")
        return not done

    def reward(self, exps: list[Experience]) -> float:
        return self.final_reward + len(exps)
"""


def test_both_forms_of_registering_have_effect(tmp_path: Path) -> None:
    (tmp_path / "trireme").symlink_to(ROOT / "trireme")
    shutil.copytree(ROOT / "trinity", tmp_path / "trinity")
    home = tmp_path / "trinity" / "common" / "workflows"
    (home / "mine.py").write_text(MINE)
    with (home / "__init__.py").open("a") as file:
        file.write(
            "from .mine import MyAlfworld\n"
            "from trinity.utils.registry import Registry\n"
            'WORKFLOWS = Registry("workflows", default_mapping={\n'
            '  "my_step_wise": "trinity.common.workflows.mine.MyStepWise",\n'
            "})\n"
        )
    config = small_config(tmp_path)
    config["buffer"]["total_steps"] = 1
    config["buffer"]["explorer_input"]["default_eval_workflow_type"] = "my_step_wise"
    config["buffer"]["explorer_input"]["default_workflow_type"] = "my_alfworld"
    done = subprocess.run(
        command(tmp_path, config), capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path,
        env=environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evaluation held_out at step 0: reward 2.500" in done.stdout + done.stderr
    rows = tmp_path.rglob("experience_buffer.jsonl")
    lines = [json.loads(line) for file in rows for line in file.read_text().splitlines()]
    assert {row["reward"] for row in lines} == {0.75}
    assert all(row["metrics"]["env_rounds"] == 1 for row in lines)
