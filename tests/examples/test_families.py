"""Each example of an algorithm, a judge, a tool and a sandbox runs, with a few small steps."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import ROOT, trireme

EXAMPLES = ROOT / "examples"
DIFFERS = "buffer.explorer_input.{}default_reward_fn_type=tests.e2e.job:length_reward"
"""A reward that differs from reply to reply, since a model that knows nothing earns no other."""
MEASURE = "eval/held_out/reward/mean@1"
SMALL = (
    "buffer.batch_size=4",
    "buffer.total_steps=2",
    "algorithm.repeat_times=4",
    "model.max_response_tokens=12",
    "explorer.eval_interval=2",
)


class Workshop:
    """A folder with all that the examples' own scripts make, the measures cut to a few tasks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for script in (
            "algorithms/make_data",
            "code_and_sql/make_programs",
            "search_tool/make_corpus",
        ):
            if (EXAMPLES / script).with_suffix(".py").exists():  # it goes with its extension
                self.make(f"{script}.py")
        for test in root.glob("*_assets/seed_0/*test.jsonl"):
            test.write_text("".join(test.read_text().splitlines(keepends=True)[:4]))
        self.model = f"model.model_path={root}/arithmetic_assets/seed_0/model"

    def make(self, script: str, *words: str) -> None:
        """One of the examples' scripts, in this process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRIREME_CHECKPOINT_ROOT_DIR", str(self.root))
            patch.setattr(sys, "argv", [script, *words])
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")

    def run(self, yaml: str, *overrides: str) -> None:
        """`trireme run` on an example."""
        words = ("run", str(EXAMPLES / yaml), *overrides)
        done = trireme(self.root, *words, TRIREME_CHECKPOINT_ROOT_DIR=str(self.root))
        assert done.returncode == 0, done.stdout + done.stderr

    def metrics(self, job: str, metric: str) -> list[float]:
        """A metric of a job, step by step."""
        path = self.root / "Trireme-examples" / job / "monitor" / "metrics.jsonl"
        rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
        return [row["metrics"][metric] for row in rows if metric in row["metrics"]]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("families"))


CASES: dict[str, tuple[Sequence[str], str]] = {
    "ppo": ((), "critic/value_mean"),
    "gspo": ((), "actor/pg_clipfrac"),
    "dapo": (("buffer.train_batch_size=16", "trainer.total_steps=2"), "actor/ppo_kl"),
    "mix": (("buffer.train_batch_size=20",), "sample/expert_count"),
    "curriculum": ((), "actor/ppo_kl"),
}
"""What each needs to be small, and a metric that only its own parts give or that all have."""
NEEDS = {"curriculum": pytest.mark.extension("curricula")}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=NEEDS[name]) if name in NEEDS else name for name in CASES],
)
def test_an_algorithm(workshop: Workshop, name: str) -> None:
    overrides, metric = CASES[name]
    small = [word for word in SMALL if name != "dapo" or "buffer.total_steps" not in word]
    workshop.run(f"algorithms/{name}.yaml", workshop.model, DIFFERS.format(""), *small, *overrides)
    assert len(workshop.metrics(f"{name}_0", metric)) == 2
    assert min(workshop.metrics(f"{name}_0", "actor/grad_norm")) > 0
    # Before, and after the last step; of `dapo`, whose explorer may be steps ahead, also between.
    assert len(workshop.metrics(f"{name}_0", MEASURE)) >= 2


def test_explorer_and_trainer_as_two_commands(workshop: Workshop) -> None:
    words = (workshop.model, DIFFERS.format(""), *SMALL, "buffer.train_batch_size=16")
    for mode in ("explore", "train"):  # one after the other: what was stored is trained later
        workshop.run("algorithms/asynchronous.yaml", *words, f"mode={mode}")
    assert workshop.metrics("asynchronous_0", "rollout/staleness_mean") == [0, 1]


def test_a_teacher_is_trained_by_the_warm_up_and_asked(workshop: Workshop) -> None:
    workshop.run("algorithms/warm_up.yaml", "name=teacher_0", "buffer.total_steps=2")
    folder = workshop.root / "Trireme-examples/teacher_0/global_step_2/actor/huggingface"
    teacher = f"[{{model_path: {folder}, max_model_len: 160}}]"
    workshop.run(
        "algorithms/on_policy_distill.yaml",
        workshop.model,
        *SMALL,
        f"explorer.auxiliary_models={teacher}",
    )
    advantages = workshop.metrics("on_policy_distill_0", "critic/advantage_abs_mean")
    assert len(advantages) == 2 and min(advantages) > 0


def test_pairs_and_labels_of_a_run_are_what_dpo_and_kto_learn_from(workshop: Workshop) -> None:
    run = workshop.root / "Trireme-examples/tried"
    (run / "buffer").mkdir(parents=True)
    rows = [
        {
            "eid": f"1/{task}/{n}/0",
            "step": 1,
            "reward": float(n == task % 3),
            "prompt": f"<|user|>Ben has {task} eggs?<|end|><|assistant|>",
            "response": f"#### {n}",
        }
        for task in range(8)
        for n in range(2)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "buffer/experience_buffer.jsonl").write_text(text)
    workshop.make("algorithms/make_data.py", "--pairs", str(run), "--labels", str(run))
    pairs = (workshop.root / "arithmetic_assets/seed_0/pairs.jsonl").read_text().splitlines()
    assert len(pairs) == 6  # of tasks 2 and 5 no reply is right
    assert json.loads(pairs[1]) == {
        "prompt": "Ben has 1 eggs?", "chosen": "#### 1", "rejected": "#### 0",
    }  # fmt: skip
    workshop.run(
        "algorithms/dpo.yaml", workshop.model, "buffer.train_batch_size=3", "buffer.total_steps=2"
    )
    losses = workshop.metrics("dpo_0", "actor/loss")
    assert len(losses) == 2 and abs(losses[0] - 0.6931) < 1e-3
    labelled = (workshop.root / "arithmetic_assets/seed_0/labelled.jsonl").read_text().splitlines()
    assert len(labelled) == 16
    assert json.loads(labelled[2]) == {
        "prompt": "Ben has 1 eggs?", "completion": "#### 0", "label": False,
    }  # fmt: skip
    weight = "algorithm.policy_loss_fn_args.desirable_weight=1.0"
    small = ("buffer.train_batch_size=4", "buffer.total_steps=2")
    workshop.run("algorithms/kto.yaml", workshop.model, weight, *small)
    losses = workshop.metrics("kto_0", "actor/loss")
    assert len(losses) == 2 and abs(losses[0] - 0.5) < 1e-3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("code_and_sql/code", marks=pytest.mark.extension("sandbox")),
        pytest.param("code_and_sql/sql", marks=pytest.mark.extension("sandbox")),
        "search_tool/search",
    ],
)
def test_an_example_of_two_stages(workshop: Workshop, name: str) -> None:
    workshop.run(f"{name}.yaml", *SMALL, "stages.0.buffer.total_steps=2")
    job = f"{name.rpartition('/')[2]}_0/grpo"
    assert workshop.metrics(job, "rollout/reward/mean") == [0, 0]  # the model knows nothing yet
    assert len(workshop.metrics(job, MEASURE)) == 2


@pytest.mark.extension("external_model")
def test_a_judge_gives_the_rewards(workshop: Workshop) -> None:
    folder = workshop.root / "arithmetic_assets/seed_0/model"  # the policy itself, greedy
    judge = f"[{{model_path: {folder}, max_model_len: 160}}]"
    words = [word for word in SMALL if "max_response" not in word]
    workshop.run(
        "llm_judge/judged.yaml", workshop.model, *words, f"explorer.auxiliary_models={judge}"
    )
    agrees = workshop.metrics("judged_0", "rollout/agrees/mean")
    assert len(agrees) == 2 and all(0 <= value <= 1 for value in agrees)
