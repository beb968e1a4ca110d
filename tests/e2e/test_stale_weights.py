"""Faults put into the way of the weights: the probe after the push stops the run and says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from typer.testing import CliRunner

from tests.e2e.job import small_config
from trireme.cli.main import app
from trireme.engines.adapter import Merged
from trireme.engines.torch import engine as engine_module
from trireme.engines.torch import shell as shell_module
from trireme.engines.torch.shell import load_weights, share_shell

Load = Callable[[Any, Any], None]
take_adapter = Merged.take


def skipped(module: Any, source: Any) -> None:
    """The copy never happens."""


def partly(module: Any, source: Any) -> None:
    """One layer keeps what it had."""
    layer = module.model.layers[1]
    old = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    load_weights(module, source)
    layer.load_state_dict(old)


def corrupted(module: Any, source: Any) -> None:
    """Half of one tensor is another's."""
    load_weights(module, source)
    weight = module.model.layers[0].mlp.down_proj.weight
    weight[: len(weight) // 2] = weight[len(weight) // 2 :].clone()


def not_a_number(module: Any, source: Any) -> None:
    """One number of a norm that every token passes."""
    load_weights(module, source)
    module.model.norm.weight[3] = torch.nan


def stale_head(module: Any, source: Any) -> None:
    """The head was tied to the embedding and is no more: only the embedding is new."""
    old = module.lm_head.weight.detach().clone()
    load_weights(module, source)
    module.lm_head.weight = nn.Parameter(old, requires_grad=False)


def swapped(module: Any, source: Any) -> None:
    """Two layers have changed places."""

    def name(name: str) -> str:
        return re.sub(r"layers\.(\d)", lambda found: f"layers.{1 - int(found[1])}", name)

    assert isinstance(source, dict)
    given: dict[str, Tensor] = {name(key): tensor for key, tensor in source.items()}
    load_weights(module, given)


def unmerged(self: Merged, module: nn.Module, adapter: Mapping[str, Tensor]) -> None:
    """An adapter is noted, and the weights stay as they were."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    take_adapter(self, module, adapter)
    module.load_state_dict(before)


def run(folder: Path, *overrides: str) -> tuple[int, str]:
    """`trireme run` in this process: exit code, and what it printed."""
    config = small_config(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    words = ["run", "--config", str(folder / "config.yaml"), *overrides]
    done = CliRunner().invoke(app, [*words, "explorer.eval_on_startup=false"])
    return done.exit_code, done.output


def check(code: int, output: str, job: Path, tensor: str) -> None:
    """The run has stopped, before a step with the wrong weights, and names the tensors."""
    assert code == 1, output
    [error] = [line for line in output.splitlines() if line.startswith("error: ")]
    found = re.fullmatch(
        r"error: after the push of version (\d) the engine does not serve the trainer's weights: "
        r"(\d+) of \d+ tensors differ \((.+)\)",
        error,
    )
    assert found, error
    assert found[1] == "1"
    assert tensor in found[3]
    assert "WrongWeights" in (job / "log/error.log").read_text()
    assert not list(job.glob("global_step_*/.full_checkpoint"))


@pytest.mark.parametrize("rate", ["1e-3", "1e-6"])
@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        (skipped, "model.embed_tokens.weight"),
        (partly, "model.layers.1."),
        (corrupted, "model.layers.0.mlp.down_proj.weight"),
        (not_a_number, "model.norm.weight"),
        (stale_head, "lm_head.weight"),
        (swapped, "model.layers.0."),
    ],
)
def test_a_copy_in_memory_that_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Load, tensor: str, rate: str
) -> None:
    monkeypatch.setattr(engine_module, "load_weights", fault)
    job = tmp_path / "checkpoints/tests/job"
    words = ["synchronizer.sync_offset=1", f"algorithm.optimizer.lr={rate}"]
    check(*run(tmp_path, *words), job, tensor)


@pytest.mark.parametrize(
    "words",
    [
        ["synchronizer.sync_method=checkpoint", "algorithm.optimizer.lr=1e-6"],
        ["model.lora_configs=[{lora_rank: 4, use_dora: true}]", "algorithm.optimizer.lr=1e-5"],
        ["model.lora_configs=[{name: a, lora_rank: 4}]", "algorithm.optimizer.lr=1e-6"],
    ],
)
def test_files_merged_weights_and_an_adapter_that_went_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(engine_module, "load_weights", skipped)
    monkeypatch.setattr(Merged, "take", unmerged)
    check(*run(tmp_path, *words), tmp_path / "checkpoints/tests/job", ".weight")


def test_right_tensors_used_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def skewed(module: Any, source: Any) -> None:
        load_weights(module, source)
        module.model.rotary_emb.inv_freq.mul_(1.5)  # no weight: what the two make of them differs

    monkeypatch.setattr(engine_module, "load_weights", skewed)
    code, output = run(tmp_path, "synchronizer.sync_offset=1")
    assert code == 1
    assert "log-probabilities differ from the trainer's by 0." in output
    assert "(at most 0.001 allowed in float32)" in output


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.self_attn.q_proj"])
def test_shared_tensors_that_are_shared_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def torn(module: Any) -> Any:
        shell = share_shell(module)
        owner = shell.get_submodule(name)
        owner.weight = nn.Parameter(owner.weight.detach().clone(), requires_grad=False)  # pyright: ignore
        return shell

    monkeypatch.setattr(shell_module, "share_shell", torn)
    check(*run(tmp_path), tmp_path / "checkpoints/tests/job", f"{name}.weight")


def test_weights_of_another_model_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(module: Any, source: Any) -> None:
        left = {name: tensor for name, tensor in source.items() if "layers.1.mlp" not in name}
        load_weights(module, left)

    monkeypatch.setattr(engine_module, "load_weights", short)
    code, output = run(tmp_path, "synchronizer.sync_offset=1")
    assert code == 1
    assert "3 tensors are missing (model.layers.1.mlp" in output
