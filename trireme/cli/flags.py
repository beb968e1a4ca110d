"""Flags: ms-swift's names on `trireme run`, as the keys of the YAML that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

_INPUT = "buffer.explorer_input"


@dataclass(frozen=True)
class SchedulerFlags:
    """What the user gave; None and empty: nothing."""

    multi_turn_scheduler: str | None = None
    max_turns: int | None = None
    loss_scale: str | None = None
    reward_funcs: Sequence[str] = ()
    reward_weights: Sequence[float] = ()
    external_plugins: Sequence[Path] = ()
    base_urls: Sequence[str] = ()

    def overrides(self, config: Path) -> list[str]:
        """`key=value` for every taskset of the file. A file that cannot be read gives the first's;
        loading it says why.
        """
        args = {
            "workflow_args.scheduler": self.multi_turn_scheduler,
            "workflow_args.max_turns": self.max_turns,
            "workflow_args.loss_scale": self.loss_scale,
            "reward_fn_args.funcs": list(self.reward_funcs) or None,
            "reward_fn_args.weights": list(self.reward_weights) or None,
        }
        given = {key: value for key, value in args.items() if value is not None}
        out = [f"{place}.{k}={_text(v)}" for place in _tasksets(config) for k, v in given.items()]
        if self.multi_turn_scheduler is not None:
            out.append(f"{_INPUT}.default_workflow_type=multi_turn_scheduler")
        if self.external_plugins:
            paths = [str(path.resolve()) for path in self.external_plugins]
            out.append(f"plugins={_text(paths)}")
        if self.base_urls:
            out.append("explorer.rollout_model.engine_type=remote")
            out.append(f"explorer.rollout_model.base_urls={_text(list(self.base_urls))}")
        return out


def _tasksets(config: Path) -> list[str]:
    """The keys of the file's tasksets."""
    try:
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
        evals = tree["buffer"]["explorer_input"].get("eval_tasksets") or []
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        evals = []
    return [f"{_INPUT}.taskset", *(f"{_INPUT}.eval_tasksets[{i}]" for i in range(len(evals)))]


def _text(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).strip().removesuffix("...")
