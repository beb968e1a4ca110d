"""Plug-ins in the class form of Trinity-RFT come to the numbers of the same part as a function."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.test_every_algorithm import _step
from trireme.algorithms import kl
from trireme.algorithms.recipes import get_recipe, row_of
from trireme.batch import Columns, flatten
from trireme.buffer.buffer import Closed
from trireme.experience import EID, Experience
from trireme.ext.trinity.classes import GroupAdvantage, aggregate_loss, as_function
from trireme.registry import ADVANTAGES, ALGORITHMS, ENTROPIES, KLS, POLICY_LOSSES, SAMPLES


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As users of Trinity-RFT write them; registered for one test."""
    for registry in (ADVANTAGES, ALGORITHMS, ENTROPIES, KLS, POLICY_LOSSES, SAMPLES):
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE, KL_FN, AlgorithmType, KLFn
    from trinity.algorithm.advantage_fn import GroupAdvantage
    from trinity.algorithm.entropy_loss_fn import ENTROPY_LOSS_FN, EntropyLossFn
    from trinity.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, PolicyLossFn
    from trinity.algorithm.utils import aggregate_loss

    @POLICY_LOSS_FN.register_module("their_ppo")
    class TheirPPO(PolicyLossFn):
        def __init__(self, backend="verl", clip=0.1, loss_agg_mode="token-mean"):
            super().__init__(backend=backend)
            self.clip, self.mode = clip, loss_agg_mode

        def __call__(self, logprob, old_logprob, action_mask, advantages, **kwargs):
            ratio = torch.exp(logprob - old_logprob)
            clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
            loss = torch.maximum(-advantages * ratio, -advantages * clipped)
            return aggregate_loss(loss, action_mask, self.mode), {"ratio": ratio.mean().item()}

        @classmethod
        def default_args(cls):
            return {"clip": 0.2}

    @ADVANTAGE_FN.register_module("their_mean")
    class TheirMean(GroupAdvantage):
        def __init__(self, scale=1.0):
            self.scale = scale

        def calculate_group_advantage(self, group_id, exps):
            mean = sum(e.reward for e in exps) / len(exps)
            for e in exps:
                e.advantages = (e.reward - mean) * self.scale * e.action_mask
                e.returns = e.advantages.clone()
            return exps, {"group_mean": mean}

    @KL_FN.register_module("their_k1")
    class TheirK1(KLFn):
        def calculate_kl(self, logprob, ref_logprob, old_logprob=None):
            return logprob - ref_logprob

    @ENTROPY_LOSS_FN.register_module("their_bonus")
    class TheirBonus(EntropyLossFn):
        def __init__(self, entropy_coef):
            self.entropy_coef = entropy_coef

        def __call__(self, entropy, action_mask, loss_agg_mode="token-mean", **kwargs):
            mean = aggregate_loss(entropy, action_mask, loss_agg_mode)
            return self.entropy_coef * mean, {"entropy_loss": mean.detach().item()}

    @ALGORITHM_TYPE.register_module("theirs")
    class Theirs(AlgorithmType):
        schema = "experience"

        @classmethod
        def default_config(cls):
            return {"repeat_times": 4, "advantage_fn": "their_mean", "policy_loss_fn": "their_ppo",
                    "kl_loss_fn": "their_k1"}  # fmt: skip

    return SimpleNamespace(**locals())


def _recipe(name: str, **given: Any) -> Any:
    return get_recipe(SimpleNamespace(algorithm_type=name, **given))


def test_an_algorithm_of_classes_has_the_gradient_of_the_same_functions(
    plugin: Any, tiny_dir: Any
) -> None:
    ours = _recipe(
        "grpo",
        policy_loss_fn_args={"clip_ratio_c": 1e6},
        kl_loss_fn="k1",
        kl_loss_fn_args={"kl_coef": 0.1},
    )
    theirs = _recipe("theirs", kl_loss_fn_args={"kl_coef": 0.1})
    assert theirs.group_size == 4 and theirs.needs_reference
    for length in (10_000, 40):  # whole, and cut into micro-batches
        expected, plain = _step(tiny_dir, ours, share=True, length=length)
        found, metrics = _step(tiny_dir, theirs, share=True, length=length)
        assert metrics["actor/pg_loss"] == pytest.approx(plain["actor/pg_loss"], abs=1e-5)
        assert metrics["actor/ratio"] > 0
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4)


def test_an_entropy_class_has_the_gradient_of_the_bonus(plugin: Any, tiny_dir: Any) -> None:
    bonus = {"kl_loss_fn": "none", "entropy_loss_fn_args": {"entropy_coef": 0.3}}
    ours = _recipe("grpo", entropy_loss_fn="default", **bonus)
    theirs = _recipe("grpo", entropy_loss_fn="their_bonus", **bonus)
    for length in (10_000, 40):
        expected, plain = _step(tiny_dir, ours, share=True, length=length)
        found, metrics = _step(tiny_dir, theirs, share=True, length=length)
        for name in ("actor/entropy", "actor/loss"):
            assert metrics[name] == pytest.approx(plain[name], abs=1e-5)
        assert metrics["actor/entropy_loss"] == pytest.approx(plain["actor/entropy"], abs=0.05)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4)


def test_an_entropy_class_without_a_coefficient_costs_nothing_and_has_an_averages_limits(
    plugin: Any,
) -> None:
    assert _recipe("grpo", entropy_loss_fn="their_bonus").entropy is None  # as default_args says
    given = {"entropy_loss_fn": "their_bonus", "entropy_loss_fn_args": {"entropy_coef": 0.1}}
    recipe = _recipe("grpo", rollout_correction={"rollout_is": "token"}, **given)
    with pytest.raises(ValueError, match="entropy_loss_fn 'their_bonus' is a class whose loss is"):
        _recipe("grpo", loss_agg_mode="seq-mean-token-sum", **given)
    with pytest.raises(ValueError, match=r"brings an expert's rows, .*'their_bonus' is a class"):
        _recipe("mix", **given)
    e = Experience([1, 2, 3], prompt_length=1, eid=EID(1, 0, 0), loss_weight=[1.0, 0.5])
    with pytest.raises(ValueError, match="'their_bonus' is a class whose loss is an average and"):
        recipe.weights(flatten([e]))


@pytest.mark.parametrize("of_options", [False, True])
def test_classes_average_in_the_mode_that_is_chosen(
    of_options: bool, plugin: Any, tiny_dir: Any
) -> None:
    mode = {"loss_agg_mode": "seq-mean-token-mean"}
    bonus = {"kl_loss_fn": "none", "entropy_loss_fn_args": {"entropy_coef": 0.3}}
    loss = {"clip_ratio_c": 1e6}
    ours = _recipe("grpo", entropy_loss_fn="default", policy_loss_fn_args=loss, **mode, **bonus)
    classes = {"policy_loss_fn": "their_ppo", "entropy_loss_fn": "their_bonus"}
    given = {"policy_loss_fn_args": mode} if of_options else mode
    theirs = _recipe("grpo", **classes, **given, **bonus)
    expected, plain = _step(tiny_dir, ours, share=True, length=10_000)
    found, metrics = _step(tiny_dir, theirs, share=True, length=10_000)
    assert metrics["actor/loss"] == pytest.approx(plain["actor/loss"], abs=1e-5)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4)


class Rows:
    """A store that counts on; its rewards are their numbers."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
        self.taken.append(n)
        first = sum(self.taken) - n
        made = (Experience([1, 2, 3], prompt_length=1, eid=EID(i)) for i in range(first, first + n))
        return list(made)


def test_a_sample_strategy_reads_its_stores_by_the_sizes_that_it_gives_them(plugin: Any) -> None:
    from trinity.algorithm.sample_strategy import SAMPLE_STRATEGY, SampleStrategy
    from trinity.buffer import get_buffer_reader
    from trinity.utils.timer import Timer

    @SAMPLE_STRATEGY.register_module("their_mix")
    class TheirMix(SampleStrategy):
        def __init__(self, buffer_config, **kwargs):
            super().__init__(buffer_config)
            others = round(kwargs.get("share", 0.5) * buffer_config.train_batch_size)
            usual = copy.deepcopy(buffer_config.trainer_input.experience_buffer)
            usual.batch_size = buffer_config.train_batch_size - others
            other = copy.deepcopy(buffer_config.trainer_input.auxiliary_buffers["more"])
            other.batch_size = others
            self.readers = get_buffer_reader(usual), get_buffer_reader(other)

        async def sample(self, step, **kwargs):
            metrics = {"sample/step": step}
            with Timer(metrics, "time/read_experience"):
                usual, others = [await reader.read() for reader in self.readers]
            for e in others:
                e.advantages = torch.ones(2)  # of the reply
            return usual + others, metrics, []

        @classmethod
        def default_args(cls):
            return {"share": 0.25}

    async def two_steps(recipe: Any) -> list[Any]:
        return [await recipe.take(own, 8, 0, {"more": more}, step) for step in (1, 2)]

    own, more = Rows(), Rows()
    [(first, metrics), (second, later)] = asyncio.run(
        two_steps(_recipe("grpo", sample_strategy="their_mix"))
    )
    assert (own.taken, more.taken) == ([6, 6], [2, 2])
    assert [e.eid.batch for e in second] == [*range(6, 12), 2, 3]
    assert first[-1].advantages.tolist() == [0, 1, 1] and first[0].advantages is None
    assert (metrics["sample/step"], later["sample/step"]) == (1, 2)
    assert metrics["time/read_experience"] >= 0
    args = {"sample_strategy": "their_mix", "sample_strategy_args": {"share": 0.5}}
    asyncio.run(two_steps(_recipe("grpo", **args)))
    assert more.taken[2:] == [4, 4]
    with pytest.raises(ValueError, match="'their_mix' has no option 'shares'"):
        _ = _recipe("grpo", **{**args, "sample_strategy_args": {"shares": 1}}).parts


@pytest.mark.parametrize("given", [[], ([], {}), (["row"], {}, []), None])
def test_what_is_no_sample_is_refused_by_the_strategys_name(plugin: Any, given: Any) -> None:
    from trinity.algorithm.sample_strategy.sample_strategy import DefaultSampleStrategy

    class Wrong(DefaultSampleStrategy):
        async def sample(self, step, **kwargs):
            await self.exp_buffer.read(1)
            return given

    recipe = _recipe("grpo", sample_strategy="default")
    SAMPLES["wrong"] = Wrong
    recipe = _recipe("grpo", sample_strategy="wrong")
    with pytest.raises(ValueError, match=r"'Wrong' gave .* for train step 3: expected a tuple"):
        asyncio.run(recipe.take(Rows(), 8, step=3))


class LastRows(Rows):
    """Has eight rows, row i of weight version i, and then its end."""

    async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
        taken: list[Experience] = []
        while n and (left := 8 - sum(self.taken)):
            rows = await super().take(min(n, left))
            for e in rows:
                e.versions = torch.full((3,), int(e.eid.batch), dtype=torch.int32)
                n -= not e.is_older(oldest)
            taken += rows
        if not taken:
            raise Closed("read to its end")
        return taken


def test_a_strategy_reads_by_either_name_and_leaves_out_what_older_weights_sampled(
    plugin: Any,
) -> None:
    from trinity.algorithm.sample_strategy.sample_strategy import DefaultSampleStrategy

    class Fresh(DefaultSampleStrategy):
        async def sample(self, step, **kwargs):
            first = await self.exp_buffer.read_async(2)
            return first + await self.exp_buffer.read(2, min_model_version=4), {}, []

    SAMPLES["fresh"] = Fresh
    taken, metrics = asyncio.run(_recipe("grpo", sample_strategy="fresh").take(LastRows(), 4))
    assert [e.eid.batch for e in taken] == [0, 1, 4, 5]
    assert metrics["sample/dropped_stale"] == 2


def test_a_plain_sample_method_is_refused_before_the_run(plugin: Any) -> None:
    from trinity.algorithm.sample_strategy.sample_strategy import DefaultSampleStrategy

    class Plain(DefaultSampleStrategy):
        def sample(self, step, **kwargs):
            return self.exp_buffer.read(), {}, []

    SAMPLES["plain"] = Plain
    with pytest.raises(ValueError, match="'Plain': expected `async def sample"):
        _ = _recipe("grpo", sample_strategy="plain").parts


def test_what_a_strategy_had_read_when_the_data_ended_is_counted(
    plugin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from trinity.algorithm.sample_strategy.sample_strategy import DefaultSampleStrategy

    class Twice(DefaultSampleStrategy):
        async def sample(self, step, **kwargs):
            return [e for n in (3, 3) for e in await self.exp_buffer.read(n)], {}, []

    SAMPLES["twice"] = Twice

    async def until_the_end() -> None:
        recipe, rows = _recipe("grpo", sample_strategy="twice"), LastRows()
        assert len((await recipe.take(rows, 6, step=1))[0]) == 6
        with pytest.raises(Closed):
            await recipe.take(rows, 6, step=2)

    with caplog.at_level("WARNING", logger="trireme.trainer"):
        asyncio.run(until_the_end())
    assert "step 2: the 2 experiences that it had read are not trained" in caplog.text


def test_staleness_control_trains_the_last_fresh_ones() -> None:
    options = {"sample_strategy_args": {"max_staleness": 0}}
    recipe = _recipe("grpo", sample_strategy="staleness_control", **options)
    taken, metrics = asyncio.run(recipe.take(LastRows(), 8, version=3))
    assert [e.eid.batch for e in taken] == [3, 4, 5, 6, 7]
    assert metrics["sample/dropped_stale"] == 3


def test_a_kl_class_is_given_the_old_log_probabilities_where_it_names_them(plugin: Any) -> None:
    @KLS.register_module("their_corrected")
    class Corrected(plugin.KLFn):
        def calculate_kl(self, logprob, ref_logprob, old_logprob=None):
            return torch.exp(logprob - old_logprob) * (logprob - ref_logprob)

    data = {"logprobs": [-1.0], "ref_logprobs": [-3.0], "old_logprobs": [-2.0]}
    tensors = {name: torch.tensor(values) for name, values in data.items()}
    part = _recipe("grpo", kl_loss_fn="their_corrected", kl_loss_fn_args={"kl_coef": 1.0}).kl
    assert part(Columns(tensors)).item() == pytest.approx(2 * math.e)


def test_an_advantage_class_sets_what_experiences_learn(plugin: Any) -> None:
    given = [
        Experience([1, 2, 3], prompt_length=1, reward=reward, eid=EID(1, 0, run))
        for run, reward in enumerate((0.0, 1.0))
    ]
    recipe = _recipe("theirs", advantage_fn_args={"scale": 4.0})
    kept, metrics = recipe.advantages(given)
    advantages = [e.advantages.tolist() for e in kept if e.advantages is not None]
    assert advantages == [[0, -2, -2], [0, 2, 2]] and metrics == {"group_mean": 0.5}


@pytest.mark.parametrize(("advantages", "has"), [(None, "none"), ([1.0] * 5, "5 numbers")])
def test_an_advantage_class_that_gives_another_length_is_told_what_it_gave(
    plugin: Any, advantages: list[float] | None, has: str
) -> None:
    def gives(self: Any, group_id: str, exps: Any) -> Any:
        for e in exps:
            e.advantages = e.returns = advantages
        return exps, {}

    plugin.TheirMean.calculate_group_advantage = gives
    given = [Experience([1, 2, 3], prompt_length=1, reward=1.0, eid=EID(1, 0, 0))]
    message = f"gave experience 1/0/0/0 {has} as advantages: expected 2, one for each token"
    with pytest.raises(ValueError, match=message):
        _recipe("theirs").advantages(given)


def test_what_plug_ins_count_by_the_helpers_of_trinity() -> None:
    from trinity.algorithm.sample_strategy import SampleStrategy
    from trinity.algorithm.utils import prefix_metrics

    class Counts(SampleStrategy):
        async def sample(self, step: int, **kwargs: Any) -> Any:
            return [], {}, []

    metrics: dict[str, Any] = {}
    rows = [Experience([1, 2], prompt_length=1, versions=[version]) for version in (0, 3, -1)]
    Counts(None).set_model_version_metric(rows, metrics)
    assert metrics == {"sample/model_version": 1.5}  # what no weights sampled has no version
    assert prefix_metrics({"a": 1}, "actor") == {"actor/a": 1}
    assert prefix_metrics({"a": 1}, "actor", metrics) is metrics and metrics["actor/a"] == 1


def test_options_and_forms_that_cannot_be_are_told(plugin: Any) -> None:
    with pytest.raises(ValueError, match=r"has no option 'clipp' .did you mean 'clip'"):
        _ = _recipe("grpo", policy_loss_fn="their_ppo", policy_loss_fn_args={"clipp": 1}).parts
    plugin.Theirs.schema = "task"
    with pytest.raises(ValueError, match="schema 'task': expected experience, sft or dpo"):
        row_of("theirs")
    plugin.TheirPPO.default_args = classmethod(lambda cls: {"tau": 1.0})
    with pytest.raises(ValueError, match="default_args of TheirPPO has 'tau', which its construct"):
        _ = _recipe("grpo", policy_loss_fn="their_ppo").parts
    plugin.TheirMean.compute_in_trainer = classmethod(lambda cls: True)
    with pytest.raises(ValueError, match=r"'their_mean' \(TheirMean\) computes in Trinity-RFT's"):
        _ = _recipe("grpo", advantage_fn="their_mean").parts


def test_an_advantage_class_that_does_not_say_where_it_computes_is_told_how(plugin: Any) -> None:
    from trinity.algorithm.advantage_fn import ADVANTAGE_FN, AdvantageFn

    @ADVANTAGE_FN.register_module("unplaced")
    class Unplaced(AdvantageFn):
        def __call__(self, exps: Any, **kwargs: Any) -> Any:
            for e in exps:
                e.advantages = e.reward * e.action_mask
            return exps, {}

    told = (
        r"algorithm.advantage_fn 'unplaced' \(Unplaced\) does not say where it computes: if it "
        "takes experiences, add a classmethod compute_in_trainer that returns False"
    )
    with pytest.raises(ValueError, match=told):
        _ = _recipe("grpo", advantage_fn="unplaced").parts
    Unplaced.compute_in_trainer = classmethod(lambda cls: False)
    e = Experience([1, 2, 3], prompt_length=1, reward=2.0, eid=EID(1, 0, 0))
    (kept,), _ = _recipe("grpo", advantage_fn="unplaced").advantages([e])
    assert kept.advantages is not None
    assert kept.advantages.tolist() == [0, 2, 2]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"policy_loss_fn_args": {"top_entropy_quantile": 0.2}}, "top_entropy_quantile chooses"),
        ({"rollout_correction": {"rollout_is": "token"}}, "rollout_correction.rollout_is weighs"),
        ({"rollout_correction": {"rollout_rs": "token"}}, "rollout_correction.rollout_rs weighs"),
        ({"loss_agg_mode": "seq-mean-token-sum"}, "'token-mean' or 'seq-mean-token-mean'"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "'token-mean' or 'seq-mean-token-mean'"),
    ],
)
def test_what_chooses_or_weighs_tokens_is_refused_beside_a_loss_that_is_an_average(
    plugin: Any, given: dict[str, Any], told: str
) -> None:
    _recipe("grpo", **given)  # a loss of tokens takes it
    with pytest.raises(ValueError, match=told):
        _recipe("grpo", policy_loss_fn="their_ppo", **given)


def test_an_experts_rows_are_refused_beside_a_loss_that_is_an_average(plugin: Any) -> None:
    """Own and expert tokens are averaged apart, which a class that averages all cannot do."""
    told = "sample_strategy 'mix' brings an expert's rows"
    with pytest.raises(ValueError, match=told):
        _recipe("mix", policy_loss_fn="their_ppo")
    with pytest.raises(ValueError, match=told):
        _recipe("theirs", sample_strategy="mix")


def test_a_loss_weight_is_refused_beside_a_loss_that_is_an_average(plugin: Any) -> None:
    e = Experience([1, 2, 3], prompt_length=1, eid=EID(1, 0, 0), loss_weight=[1.0, 0.0])
    batch = flatten([e])
    assert _recipe("grpo").weights(batch).tolist() == [0.5, 0]
    with pytest.raises(ValueError, match=r"1/0/0.* has a loss_weight of 0.*weights of 1 only"):
        _recipe("grpo", policy_loss_fn="their_ppo").weights(batch)


def test_what_an_object_counts_goes_on_from_call_to_call(plugin: Any) -> None:
    def count(self: Any) -> float:
        self.calls = getattr(self, "calls", 0) + 1
        return float(self.calls)

    plugin.TheirPPO.__call__ = lambda self, logprob, action_mask: (
        logprob.mean(),
        {"calls": count(self)},
    )
    plugin.TheirMean.calculate_group_advantage = lambda self, group_id, exps: (
        [],
        {"calls": count(self)},
    )
    plugin.TheirK1.calculate_kl = lambda self, logprob, ref_logprob: logprob * 0 + count(self)
    zeros = torch.zeros(2)
    columns = {"logprobs": zeros, "ref_logprobs": zeros, "sample_ids": zeros.long()}

    def calls(recipe: Any) -> list[float]:
        _, metrics = recipe.policy_loss(Columns(columns))
        _, found = recipe.advantages([Experience([1, 2], prompt_length=1, eid=EID(1, 0, 0))])
        divergence = recipe.kl(Columns(columns))
        return [float(metrics["calls"][0]), found["calls"], float(divergence[0])]

    recipe = _recipe("theirs")
    assert [calls(recipe) for _ in range(3)] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert calls(_recipe("theirs")) == [1.0] * 3  # each algorithm has objects of its own


def test_constants_are_texts() -> None:
    from trinity.common.constants import StorageType, SyncMethod

    assert SyncMethod.NCCL == "nccl" and StorageType("sql") is StorageType.SQL


@pytest.mark.parametrize("mode", kl.LOSS_AGG_MODES)
def test_the_average_of_class_plug_ins_is_the_mode_of_that_name(mode):
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0]])
    values = torch.tensor([[9.0, 1.0, 2.0, 3.0], [8.0, 9.0, 9.0, 9.0]])
    weights = kl.weights(mode, torch.tensor([0, 0, 0, 1]), 2, width=4)
    expected = (weights * values[mask.bool()]).sum().item()
    assert aggregate_loss(values, mask, mode).item() == pytest.approx(expected, rel=1e-5)
    if mode == "seq-mean-token-sum-norm":
        assert aggregate_loss(values, mask, mode, normalizer=7.0).item() == pytest.approx(2)


class Selecting(GroupAdvantage):
    """Has the option, and leaves nothing that could be taken back."""

    def __init__(self, std_threshold: float | None = 0.0) -> None:
        self.std_threshold = std_threshold

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"std_threshold": 0.0}


def test_a_limit_that_no_batch_waits_for_is_refused() -> None:
    algorithm = {"algorithm_type": "dapo", "advantage_fn_args": {"max_resample_times": 2}}
    algorithm["advantage_fn"] = f"{__name__}:Selecting"
    with pytest.raises(ValueError, match="max_resample_times") as caught:
        get_recipe(SimpleNamespace(**algorithm))
    assert "is a class that keeps and leaves out" in str(caught.value)


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (lambda loss: loss, r"returned tensor.*: expected a tuple of a loss and a dictionary"),
        (lambda loss: (loss, None), r"returned \(tensor.*: expected a tuple of a loss"),
        (lambda loss: (loss, {"a": [1, 2]}), r"gave the metric 'a' as \[1, 2\]: expected a number"),
        (lambda loss: (loss.expand(2, 3), {}), r"gave a loss of the shape \[2, 3\]: expected one"),
    ],
)
def test_a_loss_class_that_returns_another_form_is_named(plugin: Any, of: Any, says: str) -> None:
    class Odd(plugin.PolicyLossFn):
        def __call__(self, logprob, action_mask, advantages):
            return of((-advantages * logprob * action_mask).sum() / action_mask.sum())

    loss = as_function("policy_loss_fn", "odd", Odd)
    values = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match=f"Odd' {says}"):
        loss(torch.zeros(4, dtype=torch.long), logprobs=values, advantages=values.detach())


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (lambda exps: None, "returned None: expected a tuple of experiences and a dictionary"),
        (lambda exps: exps, r"returned \[Experience.*: expected a tuple of experiences"),
        (lambda exps: (exps, {"a": None}), "gave the metric 'a' as None: expected a number"),
    ],
)
def test_an_advantage_class_that_returns_another_form_is_named(
    plugin: Any, of: Any, says: str
) -> None:
    class Odd(GroupAdvantage):
        def calculate_group_advantage(self, group_id, exps):
            return of(exps)

    advantage = as_function("advantage_fn", "odd", Odd)
    e = Experience([1, 2, 3], prompt_length=1, reward=1.0, eid=EID(1, 0, 0))
    with pytest.raises(ValueError, match=f"Odd' {says}"):
        advantage([e, e])
