"""Towers that are trained: their gradients are transformers' own, on any number of ranks, and what
they have learned reaches the engine.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.e2e.job import run as run_job
from tests.ext.images.seeing import make_seeing
from tests.ext.images.test_exact import known, own_scores, samples
from tests.ext.images.test_ranks import learned
from tests.ext.images.test_runs import config_of, gaps
from tests.trainer.ranks import run
from tests.trainer.samples import apart, backend_of, gap, gradients_of, move
from trireme.algorithms.recipes import get_recipe
from trireme.batch import of_tokens
from trireme.checkpoint.layout import JobFolder
from trireme.config import ConfigError, load_config
from trireme.config.schema import AlgorithmConfig
from trireme.engines.torch.composite import towers
from trireme.experience import Experience
from trireme.launch.check import make_plans
from trireme.launch.resume import made_with, refuse_meaningless
from trireme.pictures import BEGIN
from trireme.trainer.ranks import Ranks, RankSpec

BOTH: Any = {"trains_tower": True, "trains_projector": True}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp(request.param), request.param)


def test_gradients_are_those_of_transformers_whole_model(folder: Path) -> None:
    rows = [samples(folder)[0], samples(folder)[4]]
    batch = of_tokens([e.tokens.tolist() for e in rows], pictures=[*known(rows).values()])
    wanted = flat_text(rows)
    backend = backend_of(folder, max_token_len=999, **BOTH)
    backend.forward_backward(batch, lambda part, logprobs, _: -logprobs.sum() / wanted.sum())
    got = {name: p.grad for name, p in backend.module.named_parameters() if p.grad is not None}
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    scores = [own_scores(folder, e.tokens.tolist(), known(rows), model=model) for e in rows]
    (-(torch.cat(scores) * wanted).sum() / wanted.sum()).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    seen = {name for name, _ in towers(model)}
    assert seen & expected.keys() and got.keys() >= expected.keys()
    assert gap({name: got[name] for name in expected}, expected) < 1e-5
    # a pooling head that nothing passes through has a gradient of 0
    assert all(float(got[name].abs().max()) == 0 for name in got.keys() - expected.keys())


def flat_text(rows: list[Experience]) -> Tensor:
    """1 for the tokens after the first of each row that are text, else 0."""
    flags = [torch.tensor([float(t < BEGIN) for t in e.tokens.tolist()[1:]]) for e in rows]
    return torch.cat(flags)


def test_packed_and_shared_is_single_in_the_tower_too(folder: Path) -> None:
    recipe: Any = get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))
    gradients = []
    for tokens, share in ((1, False), (999, True)):
        backend = backend_of(folder, max_token_len=tokens, share_prefix=share, **BOTH)
        move(backend)
        gradients.append(gradients_of(backend, recipe, samples(folder))[0])
    trained = {name for name, p in towers(backend.module) if p.requires_grad}
    assert trained and gradients[0].keys() >= trained
    assert gap(gradients[1], gradients[0]) < 1e-5


@pytest.mark.parametrize("key", sorted(BOTH))
def test_each_part_is_trained_alone(folder: Path, key: str) -> None:
    only: Any = {key: True}
    backend = backend_of(folder, **only)
    projectors = ("multi_modal_projector", "merger")
    for name, tensor in towers(backend.module):
        projects = any(part in name for part in projectors)
        wanted = projects == (key == "trains_projector")
        assert tensor.requires_grad == (wanted and isinstance(tensor, torch.nn.Parameter)), name
    assert not backend.towers  # a push sends all of them


def on_rank(place: RankSpec, folder: Path) -> dict[str, Any]:
    ranks = Ranks(place)
    found = learned(backend_of(folder, ranks, **BOTH), folder)
    ranks.close()
    return found


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_rank_that_sees_no_picture_takes_its_part(family: str, tmp_path: Path) -> None:
    folder = make_seeing(tmp_path / "model", family)
    expected = learned(backend_of(folder, **BOTH), folder)
    for got in run(on_rank, tmp_path / "ranks", folder, world=2):
        assert gap(got["gradients"], expected["gradients"]) < 1e-5
        assert apart(got["weights"], expected["weights"]) < 1e-3
        assert torch.allclose(got["scores"], expected["scores"], atol=1e-4)


def test_what_a_tower_has_learned_reaches_the_engine(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen2_5_vl")
    config["model"] |= {"freeze_vision_tower": False, "freeze_projector": False}
    config["algorithm"]["optimizer"] = {"lr": 1e-3}
    done = run_job(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(gaps(tmp_path)) < 1e-4
    end = tmp_path / "checkpoints/tests/job/global_step_4/actor/huggingface/model.safetensors"
    start, after = load_file(tmp_path / "seeing/model.safetensors"), load_file(end)
    before = {name[name.find("visual") :]: tensor for name, tensor in start.items()}
    of_tower = {name[name.find("visual") :]: t for name, t in after.items() if "visual" in name}
    moved = {name for name, tensor in of_tower.items() if not torch.equal(before[name], tensor)}
    assert any("blocks" in name for name in moved) and any("merger" in name for name in moved)


def test_a_resume_that_trains_other_parts_is_refused(tmp_path: Path) -> None:
    """The optimizer's moments would be those of other weights."""
    config = config_of(tmp_path)
    facts = []
    for frozen in (True, False):
        config["model"]["freeze_projector"] = frozen
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(config))
        [plan] = make_plans(load_config(path))
        facts.append(made_with(plan, plan.model_path, get_recipe(plan.config.algorithm)))
    job = JobFolder(plan.job_dir)
    refuse_meaningless(job, 1, facts[1], facts[1])
    with pytest.raises(ConfigError, match="trained vision parts none, and now has projector, for"):
        refuse_meaningless(job, 1, *facts)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"lora_configs": [{"lora_rank": 4}]}, "trains an adapter of the language model alone"),
        ({"model_path": "tiny"}, "sees no pictures"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_run(
    changed: dict[str, Any], sentence: str, tmp_path: Path, tiny_dir: Path
) -> None:
    config = config_of(tmp_path)
    config["model"] |= {"freeze_vision_tower": False, **changed}
    if "model_path" in changed:
        config["model"]["model_path"] = str(tiny_dir)
    done = run_job(tmp_path, config)
    assert done.returncode
    assert re.search(f"model.freeze_vision_tower.* is false.*{sentence}", done.stdout + done.stderr)
