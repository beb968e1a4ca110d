"""Household workflow: episodes in the small text household, one experience a step."""

from __future__ import annotations

from trireme.envs.household import Household, Layout
from trireme.workflows.episode import EpisodeWorkflow


class HouseholdWorkflow(EpisodeWorkflow):
    """`format.prompt_key` names the column with the layout's number."""

    per_step = True
    blocking_env = False
    max_env_steps = 10
    unfinished_reward = 0.0

    def make_env(self) -> Household:
        """The household of the task's layout."""
        return Household(Layout.numbered(int(self.task_desc)))
