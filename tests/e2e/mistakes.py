"""Mistakes: what people do wrong, and what they are told. Add a row to MISTAKES.

`python -m tests.e2e.mistakes` types each command and prints its answer.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner, Result

from tests.e2e.job import rows, small_config, write_jsonl
from trireme.checkpoint.layout import JobFolder
from trireme.cli.main import app

TASKSET = "buffer.explorer_input.taskset"
PLUGIN = '''
"""One reward, workflow or operator for each way to get it wrong."""
import asyncio
import time

import torch

from trireme import Experience, Model, Task, reward, workflow
from trireme.registry import operator
from trireme.workflows.classes import Workflow
from trireme.workflows.episode import EpisodeWorkflow

PRICES = {}


@reward("mistaken_good")
def good(task: Task, answer: str) -> float:
    return len(answer) / 8


@reward("mistaken_same")
def same(task: Task, answer: str) -> float:
    return 0.5


@reward("mistaken_letters")
def letters(task: Task, answer: str) -> float:
    return float(len(set(answer)))


@reward("mistaken_price")
def price(task: Task, answer: str) -> float:
    return PRICES[task.prompt]


@reward("mistaken_nan")
def nan(task: Task, answer: str) -> float:
    return float("nan")


@reward("mistaken_none")
def none(task: Task, answer: str):
    len(answer)


@reward("mistaken_text")
def text(task: Task, answer: str):
    return "0.5"


@reward("mistaken_tensor")
def tensor(task: Task, answer: str):
    return torch.tensor(len(answer) / 8)


@reward("mistaken_one_argument")
def one_argument(answer):
    return 1.0


@reward("mistaken_order")
def swapped(answer, task):
    return float(answer == task.truth)


@reward("mistaken_trl")
def trl(completions, **kwargs):
    return [len(completion) / 8 for completion in completions]


@reward("mistaken_column")
def column(prompts, completions, levels, **kwargs):
    return [0.0 for completion in completions]


@reward("mistaken_half")
def half(task: Task, answer: str) -> float:
    if int(task.prompt.split("(")[1].rstrip(")")) % 2:
        raise LookupError("no price for " + task.prompt)
    return len(answer) / 8


for kind in ("loop_a", "loop_b"):
    reward("mistaken_" + kind)(lambda task, answer: len(answer) / 8)


@operator("mistaken_operator")
def takes_nothing():
    return []


@operator("mistaken_raises")
def raises(experiences):
    return experiences[10**6]


async def said(task: Task, model: Model) -> str:
    return (await model.chat([{"role": "user", "content": task.prompt}])).text


@workflow("mistaken_needs")
class Needs(Workflow):
    @classmethod
    def needs(cls, task):
        return {"no_such_game": "the game"}

    def run(self):
        return []


@workflow("mistaken_env")
class Env(EpisodeWorkflow):
    def make_env(self):
        return {}["no such house"]


@workflow("mistaken_forgets_return")
async def forgets_return(task: Task, model: Model):
    await said(task, model)


@workflow("mistaken_returns_number")
async def returns_number(task: Task, model: Model):
    return 1.0


@workflow("mistaken_forgets_await")
async def forgets_await(task: Task, model: Model):
    reply = model.chat([{"role": "user", "content": task.prompt}])
    return model.experiences(reward=len(reply.text))


@workflow("mistaken_plain")
def plain(task: Task, model):
    reply = model.chat([{"role": "user", "content": task.prompt}])
    return model.experiences(reward=len(reply.text) / 8, words=len(reply.text.split()))


@workflow("mistaken_sleeps")
async def sleeps(task: Task, model: Model):
    await said(task, model)
    time.sleep(1000)


@workflow("mistaken_metrics")
async def metrics(task: Task, model: Model):
    await said(task, model)
    found = model.experiences(reward=1.0)
    found[0].metrics["z"] = "text"
    return found


@workflow("mistaken_cut")
async def cut(task: Task, model: Model):
    await said(task, model)
    found = model.experiences(reward=1.0)
    found[0].tokens = found[0].tokens[:3]
    return found


@workflow("mistaken_logprobs")
async def logprobs(task: Task, model: Model):
    await said(task, model)
    found = model.experiences(reward=1.0)
    found[0].logprobs[-1] = float("nan")
    return found


@workflow("mistaken_interrupts")
async def interrupts(task: Task, model: Model):
    raise KeyboardInterrupt


@workflow("mistaken_text_reward")
async def text_reward(task: Task, model: Model):
    await said(task, model)
    return model.experiences(reward="0.5")
'''


@dataclass(frozen=True)
class Mistake:
    """A command, and what it has to say."""

    name: str
    overrides: tuple[str, ...]
    sentence: str
    """Stands in the first line; where nothing fails, anywhere."""
    line: str = ""
    """The user's own code, in the second line; where nothing fails, what is said as well."""
    code: int = 1
    """Of `run`; 2: `check` finds it too, in the same words, and nothing is started."""
    prepare: Callable[[Path], object] = lambda folder: None
    """Made before the command; a context that it returns is entered for as long as that lasts."""
    extension: str = ""
    """The one that says it."""


def _reward(name: str) -> tuple[str, ...]:
    return (f"{TASKSET}.default_reward_fn_type={name}",)


def _workflow(name: str) -> tuple[str, ...]:
    return (f"{TASKSET}.default_workflow_type={name}",)


def _operator(name: str) -> tuple[str, ...]:
    return (f"data_processor.experience_pipeline.operators=[{{name: {name}}}]",)


_EIGHT = ("algorithm.repeat_times=4",)
"""Rollouts, of which a step can be judged: fewer may be chance."""


def _plugin(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "fails_to_load.py").write_text(text)


_LOADS = ("plugins=[{folder}/fails_to_load.py]",)


def _resumes(name: str, *changed: str) -> dict[str, Any]:
    """The overrides of a job that goes on, with what is changed, and the run before it."""
    own = (f"name={name}", "continue_from_checkpoint=true")
    return {
        "overrides": (*own, *changed),
        "prepare": lambda folder: answer(Mistake(name, own, ""), folder),
    }


def _training(folder: Path) -> ExitStack:
    """Another command that trains in a job's folder, for as long as it is held."""
    job = JobFolder(folder / "checkpoints/tests/twice")
    job.make()
    held = ExitStack()
    held.enter_context(job.one_trainer())
    return held


def _cut_model(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "cut", dirs_exist_ok=True)
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


MISTAKES = [
    Mistake(
        "N33 a truncated model.safetensors", ("model.model_path={folder}/cut",),
        "model.model_path ({folder}/cut) is damaged, or was not downloaded to its end: "
        "model.safetensors: has ", code=2, prepare=_cut_model,
    ),
    Mistake(
        "N17 wrong option of a part", ("algorithm.policy_loss_fn_args={clip_rang: 0.2}",),
        "policy_loss_fn 'ppo' has no option 'clip_rang' (did you mean 'clip_range'?)", code=2,
    ),
    Mistake(
        "N18 mine:Nope", _workflow("'mistaken_plugin:plian'"),
        "module 'mistaken_plugin' has no 'plian'; did you mean 'plain'?", code=2,
    ),
    Mistake(
        "R15 a null prompt in row 12", (f"{TASKSET}.path={{folder}}/null.jsonl",),
        "row 12 ({folder}/null.jsonl, line 13): the column 'question' (format.prompt_key) is empty",
        code=2,
        prepare=lambda folder: write_jsonl(
            folder / "null.jsonl",
            [{**row, "question": None} if i == 12 else row for i, row in enumerate(rows(16))],
        ),
    ),
    Mistake(
        "R16 a row nested 5,000 deep", (f"{TASKSET}.path={{folder}}/deep.jsonl",),
        "{folder}/deep.jsonl, line 2: it is nested too deeply", code=2,
        prepare=lambda folder: (folder / "deep.jsonl").write_text(
            '{"question": "q", "answer": "a"}\n{"question": ' + "[" * 5000 + "]" * 5000 + "}\n"
        ),
    ),
    Mistake(
        "N19 own reward misspelt", _reward("mistaken_godo"),
        "unknown reward function 'mistaken_godo'; did you mean 'mistaken_good'? Known: ", code=2,
    ),
    Mistake(
        "N21 reward with one argument", _reward("mistaken_one_argument"),
        "reward 'mistaken_one_argument' takes (answer): expected (task, answer)",
        "def one_argument(answer):", code=2,
    ),
    Mistake(
        "reward with its arguments in another order", _reward("mistaken_order"),
        "reward 'mistaken_order' takes (answer, task): expected (task, answer)",
        "def swapped(answer, task):", code=2,
    ),
    Mistake(
        "group reward that needs a column", _reward("mistaken_column"),
        "reward 'mistaken_column' needs 'levels', and the data set has no such column; there are: "
        "question, answer, ", "def column(prompts, completions, levels, **kwargs):", code=2,
    ),
    Mistake(
        "operator that takes nothing", _operator("mistaken_operator"),
        "operators[0] 'mistaken_operator' takes (): expected (experiences)",
        "def takes_nothing():", code=2,
    ),
    Mistake(
        "N40 an extra is not installed", (*_workflow("mistaken_needs"),),
        "the game is not installed: pip install 'trireme-rl[envs]' "
        "[No module named 'no_such_game']",
        code=2,
    ),
    Mistake(
        "N34 plug-in with a failing import", _LOADS,
        "fails_to_load.py, which fails to load: ModuleNotFoundError: No module named 'nowhere'",
        "fails_to_load.py:2: import nowhere", code=2,
        prepare=_plugin("import json\nimport nowhere\n"),
    ),
    Mistake(
        "plug-in that is not Python", _LOADS, "fails_to_load.py, which fails to load: SyntaxError",
        "fails_to_load.py:1: def f(:", code=2, prepare=_plugin("def f(:\n"),
    ),
    Mistake(
        "plug-in that exits", _LOADS, "fails_to_load.py, which fails to load: SystemExit: 3",
        "fails_to_load.py:2: sys.exit(3)", code=2, prepare=_plugin("import sys\nsys.exit(3)\n"),
    ),
    Mistake(
        "N22 reward raises", _reward("mistaken_price"),
        "reward 'price' failed in all 4 rollouts of step 1: KeyError: 'What is ",
        "return PRICES[task.prompt]",
    ),
    Mistake(
        "N23 reward returns None", _reward("mistaken_none"),
        "reward 'none' failed in all 4 rollouts of step 1: gave None: expected a number",
        "def none(task: Task, answer: str):",
    ),
    Mistake(
        "N23 reward returns NaN", _reward("mistaken_nan"),
        "reward 'nan' failed in all 4 rollouts of step 1: gave nan: expected a finite number",
        "def nan(task: Task, answer: str) -> float:",
    ),
    Mistake(
        "N24 reward returns text", _reward("mistaken_text"),
        "reward 'text' failed in all 4 rollouts of step 1: gave '0.5': expected a number",
        "def text(task: Task, answer: str):",
    ),
    Mistake(
        "N24 workflow gives text as reward", _workflow("mistaken_text_reward"),
        "experiences(reward=...) has '0.5': expected a number",
        'model.experiences(reward="0.5")',
    ),
    Mistake(
        "N26 workflow forgets to return", _workflow("mistaken_forgets_return"),
        "workflow 'mistaken_forgets_return' failed in all 4 rollouts of step 1: returned None: "
        "expected a list of Experience; end with `return model.experiences(reward=...)`",
        "async def forgets_return(",
    ),
    Mistake(
        "N26 workflow returns a number", _workflow("mistaken_returns_number"),
        "returned 1.0: expected a list of Experience; end with", "async def returns_number(",
    ),
    Mistake(
        "N27 forgotten await", _workflow("mistaken_forgets_await"),
        "'coroutine' object has no attribute 'text': an `await` is missing, as in `reply = await "
        "model.chat(...)`", "return model.experiences(reward=len(reply.text))",
    ),
    Mistake(
        "R6 a metric that is text", _workflow("mistaken_metrics"),
        "returned an experience (place 0) with the metric 'z' 'text': expected a number",
        "async def metrics(",
    ),
    Mistake(
        "R6 tokens cut", _workflow("mistaken_cut"),
        "returned an experience (place 0) whose mask is [", "async def cut(",
    ),
    Mistake(
        "R6 log-probability NaN", _workflow("mistaken_logprobs"),
        "is nan: expected a finite number", "async def logprobs(",
    ),
    Mistake(
        "R20 KeyboardInterrupt in a workflow", _workflow("mistaken_interrupts"),
        "failed in all 4 rollouts of step 1: KeyboardInterrupt", "raise KeyboardInterrupt",
    ),
    Mistake(
        "environment raises",
        (*_workflow("mistaken_env"), "buffer.explorer_input.default_reward_fn_type=null"),
        "the environment of Env failed in all 4 rollouts of step 1: KeyError: 'no such house'",
        'return {}["no such house"]',
    ),
    Mistake(
        "operator raises", _operator("mistaken_raises"),
        "operator 'mistaken_raises' failed: IndexError: list index out of range",
        "return experiences[10**6]",
    ),
    Mistake("N20 reward in TRL's form: works", _reward("mistaken_trl"), "", code=0),
    Mistake("R24 reward registered in a loop: works", _reward("mistaken_loop_b"), "", code=0),
    Mistake("a tensor is a number: works", _reward("mistaken_tensor"), "", code=0),
    Mistake("N28 plain def workflow: works", _workflow("mistaken_plain"), "", code=0),
    Mistake(
        "N25 reward raises for half of the tasks", _reward("mistaken_half"),
        "warning: reward 'half' failed in 2 of 4 rollouts of step 1: LookupError: no price for ",
        "2 of 4 rollouts failed and were left out", code=0,
    ),
    Mistake(
        "N15 two runs in one folder", ("name=twice", "continue_from_checkpoint=true"),
        "twice has a run that trains in it: expected it to end, or another name",
        prepare=_training,
    ),
    Mistake(
        "W21 a name that leaves the project's folder", ("name=../x",),
        "name is '../x': expected the name of a folder below checkpoint_root_dir, without '..' or "
        "a '/' at the beginning", code=2,
    ),
    Mistake(
        "N16 the same command after its end", **_resumes("ended"), code=0,
        sentence="nothing was left to do: step 1 was this run's last. To train on, raise "
        "buffer.total_steps (1)",
    ),
    Mistake(
        "N30 prompts are longer than allowed", ("model.max_prompt_tokens=5", *_EIGHT),
        "prompts have more than 5 tokens (model.max_prompt_tokens, below model.max_model_len), so "
        "that nothing is asked: expected a model.max_prompt_tokens of at least", code=2,
    ),
    Mistake(
        "N31 prompts are too long and not to be cut",
        ("model.max_prompt_tokens=5", "model.enable_prompt_truncation=false"),
        "prompts have more than 5 tokens (model.max_prompt_tokens, below model.max_model_len), so "
        "that nothing is asked: expected a model.max_prompt_tokens of at least", code=2,
    ),
    Mistake(
        "N32 all rewards are equal", (*_reward("mistaken_same"), *_EIGHT),
        "equal_rewards: in 100% of the groups of the first step all rollouts have the same reward "
        "(the mean is 0.5), which gives no gradient",
        "What to do: a reward that distinguishes replies", code=0, extension="diagnosis",
    ),
    Mistake(
        "N35 a resume with another learning rate", code=0, extension="provenance",
        **_resumes("changed", "algorithm.optimizer.lr=0.01", "buffer.total_steps=2"),
        sentence="algorithm.optimizer.lr: 0.001 -> 0.01: from train step 2 on; the optimizer's "
        "moments stay",
    ),
    Mistake(
        "N35 a resume with another model", code=0, extension="provenance",
        **_resumes("other_model", "model.model_path={folder}/other", "buffer.total_steps=2"),
        sentence="its weights are ignored, since the checkpoint's are loaded; tokenizer, chat ",
    ),
    Mistake(
        "N38 a learning rate of 10 without a limit", (
            *_reward("mistaken_letters"), "algorithm.optimizer.lr=10", "trainer.grad_clip=1000",
            "buffer.total_steps=8", "algorithm.repeat_times=8", "model.max_response_tokens=40",
        ),
        "equal_rewards: in ",
        "if rewards differed at first, the policy may have collapsed to one reply: a smaller "
        "algorithm.optimizer.lr", code=0, extension="diagnosis",
    ),
]  # fmt: skip


def folder_for(folder: Path) -> Path:
    """A small job of one step with 2 x 2 rollouts, and the plug-in with the mistakes."""
    config = small_config(folder)
    plugin = folder / "mistaken_plugin.py"
    plugin.write_text(PLUGIN)
    config["plugins"] = [str(plugin)]
    config["algorithm"]["repeat_times"] = config["buffer"]["batch_size"] = 2
    config["buffer"]["total_steps"] = 1
    config["buffer"]["explorer_input"]["eval_tasksets"] = []
    config["continue_from_checkpoint"] = False
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    shutil.copytree(folder / "model", folder / "other")
    return folder


def answer(mistake: Mistake, folder: Path, command: str = "run") -> Result:
    """What the command says, typed in this process."""
    made = mistake.prepare(folder)
    words = [word.replace("{folder}", str(folder)) for word in mistake.overrides]
    with made if isinstance(made, ExitStack) else nullcontext():
        return CliRunner().invoke(app, [command, "--config", str(folder / "config.yaml"), *words])


def main() -> None:
    """Print each mistake with its answer."""
    with tempfile.TemporaryDirectory() as name:
        folder = folder_for(Path(name))
        for mistake in MISTAKES:
            done = answer(mistake, folder)
            print(f"\n{mistake.name}\n  exit {done.exit_code}")
            for line in done.stderr.splitlines():
                print(f"  {line}".replace(f"{folder}/", ""))


if __name__ == "__main__":
    main()
