"""Generated: rows that other packages generate, and the scores of answers to them.

- `reasoning_gym:NAME?OPTIONS`: a data set of reasoning-gym by its name, made row by row.
- `verifiers:NAME?OPTIONS`: an environment of the package `verifiers`. It leads the conversation and
  sets the reward; it calls an OpenAI client, which is the rollout's own.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from trireme.data.rows import DataSet, NoRows, Rows
from trireme.envs.env import extra
from trireme.log import FILE_ONLY
from trireme.registry import did_you_mean
from trireme.usercode import Refused, fault_of, with_place

logger = logging.getLogger(__name__)

COLUMNS = ("question", "answer", "metadata", "generated_by")
"""Of rows that are made."""
VERIFIERS = "verifiers:"
EMPTY_REPLY = "EmptyModelResponseError"
"""verifiers' error for a reply without text; one to a prompt that is too long has none."""
_REASONING_GYM = "reasoning_gym:"
_RAISED = re.compile(r"Error calling (?:group )?reward function (\S+):")
_RUNS = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\((?!entry)")


def generated(path: str) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the generator; None for a path of any other kind."""
    if path.startswith(VERIFIERS):
        return path.removeprefix(VERIFIERS), {}  # the environment reads them itself
    if not path.startswith(_REASONING_GYM):
        return None
    name, options = _split(path, _REASONING_GYM)
    return name, {"size": 500, "seed": 0} | options


def _split(path: str, scheme: str) -> tuple[str, dict[str, Any]]:
    name, _, text = path.removeprefix(scheme).partition("?")
    parts = [part.partition("=") for part in text.split("&") if part]
    return name, {key: yaml.safe_load(value) for key, _, value in parts}


class Problems:
    """The rows of one data set, and the scores of answers to them."""

    def __init__(self, path: str) -> None:
        """Raises ModuleNotFoundError, and ValueError for an unknown name or option."""
        made = generated(path)
        assert made is not None
        name, options = made
        factory = extra("reasoning_gym", "reasoning-gym").factory
        if name not in factory.DATASETS:
            hint = did_you_mean(name, factory.DATASETS, "did you mean '{}'?")
            hint = hint or ", ".join(sorted(factory.DATASETS))
            raise ValueError(f"reasoning-gym has no data set '{name}': {hint}")
        try:
            self._dataset = factory.create_dataset(name, **options)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"dataset '{path}' has wrong options: {error}") from error
        self._path = path
        self.runs_answers = bool(_RUNS.search(inspect.getsource(self._dataset.score_answer)))
        """Whether its score_answer passes the answer to Python's `eval`, or to sympy's parser,
        which is the same."""

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._dataset[index] | {"generated_by": self._path}

    def score(self, answer: str, row: dict[str, Any]) -> float:
        """Score an answer from 0 to 1 by the data set's own `score_answer`."""
        return float(self._dataset.score_answer(answer, row))


@lru_cache(maxsize=64)
def problems(path: str) -> Problems:
    """Return the data set of `reasoning_gym:NAME?OPTIONS`, made once."""
    return Problems(path)


@dataclass(frozen=True)
class Played:
    """An environment's record of one rollout."""

    reward: float | None
    """None: it is scored with its group, by `score_together`."""
    metrics: dict[str, float]
    trace: list[Mapping[str, Any]]
    """Its own record, call by call, with the ids of `tokens`."""
    unscored: tuple[Any, Any] | None = None
    """The environment that played it, and its state, until it is scored."""


class _Signals:
    """The module `signal`, but the handlers stay as they are."""

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    def signal(self, number: int, handler: Any) -> Any:
        """Install nothing; return the handler."""
        return signal.getsignal(number)


class _RewardErrors(logging.Filter):
    """Names a reward function that raised, once, with its line. Verifiers counts 0 for it, and logs
    a line without kind and place for each rollout.
    """

    def __init__(self) -> None:
        super().__init__()
        self._named: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a line that is replaced."""
        found, error = _RAISED.match(record.getMessage()), sys.exc_info()[1]
        if found is None or error is None:
            return True
        fault = fault_of(error, f"the reward function '{found[1]}'")
        assert fault is not None
        where = f"{fault.what} {fault.place}"
        shown = FILE_ONLY if where in self._named else {"place": fault.place}
        self._named.add(where)
        message = "%s raised %s: verifiers counts it as 0, here and wherever it raises again"
        logger.warning(message, fault.what, fault.text, extra=shown)
        return False


_reward_errors = _RewardErrors()


class Environment:
    """One environment, loaded once."""

    def __init__(self, path: str) -> None:
        """Raises ModuleNotFoundError, and ValueError for an environment that cannot be loaded or
        gives no rewards.
        """
        vf = extra("verifiers", "verifiers", "verifiers")
        # as of 0.3.1 (`Environment.__post_init__`) each environment that is made takes Ctrl-C and
        # SIGTERM for itself, which a run no longer hears, and cannot be made in a thread, as on Ray
        made_in: Any = importlib.import_module("verifiers.envs.environment")
        made_in.signal = _Signals()
        name, options = _split(path, VERIFIERS)
        split = options.pop("split", "train")
        if split not in ("train", "eval"):
            raise ValueError(f"{path}: split is '{split}': expected train or eval")
        try:
            self._environment = vf.load_environment(name, **options)
            made = self._environment
            rows = made.build_dataset() if split == "train" else made.get_eval_dataset()
        except Exception as error:  # the environment's own code
            fault = fault_of(error.__cause__ or error, path)
            assert fault is not None
            reason = f"{path}: the environment cannot be loaded: {fault.text}"
            raise ValueError(with_place(reason, fault.place)) from error
        if rows is None:
            raise ValueError(
                f"{path}: the environment has rows for evaluation alone: expected split=eval among "
                "the options, or an environment with a `dataset`"
            )
        self._path, self._rows, self._group = path, rows, vf.EnvGroup
        self._look_at_rewards(self._environment)

    def _look_at_rewards(self, member: Any) -> None:
        """Raise ValueError for an environment that would end each rollout for want of a reward."""
        if isinstance(member, self._group):
            for one in member.envs:
                self._look_at_rewards(one)
            return
        rubrics = [member.rubric]
        for rubric in rubrics:  # grows meanwhile
            rubrics += getattr(rubric, "rubrics", ())
            rubric.logger.addFilter(_reward_errors)
        scores = member.score_rollouts and not member.requires_group_rollouts
        plain = [one for one in rubrics if not hasattr(one, "rubrics")]
        if scores and not all(one._get_reward_funcs() for one in plain):
            whose = f" (of {type(member).__name__})" if member is not self._environment else ""
            raise ValueError(
                f"{self._path}: a rubric of the environment{whose} has no reward functions: "
                "expected one at least, as in rubric=vf.Rubric(funcs=[my_reward])"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        if not isinstance(row["prompt"], list):
            raise ValueError(
                f"{self._path}: row {index} has a prompt that is {type(row['prompt']).__name__}: "
                "expected a list of messages, or text in a column `question`"
            )
        users = [message["content"] for message in row["prompt"] if message["role"] == "user"]
        asked = {"question": users[-1] if users else "", "answer": row.get("answer", "")}
        return asked | {"metadata": row, "generated_by": self._path}

    async def play(
        self, row: Mapping[str, Any], client: Any, model: str, sampling: Mapping[str, Any]
    ) -> Played:
        """Run one rollout of a row. Raises RuntimeError if the environment ended it with an error.

        An empty reply of the model ends the rollout, which still has the environment's reward.
        """
        clients = extra("verifiers.clients", "verifiers", "verifiers")
        member, given = self._member(row["metadata"])
        arguments = (
            clients.OpenAIChatCompletionsClient(client),
            model,
            {**sampling, "logprobs": True, "extra_body": {"return_token_ids": True}},
        )
        if not member.requires_group_rollouts:
            ended = await member.run_rollout(given, *arguments, state_columns=["trajectory"])
            self._refuse_error(ended.get("error"), (ended.get("error") or {}).get("error"))
            return Played(*_score_of(ended), ended["trajectory"])
        state = await member.rollout(given, *arguments)
        error = state.get("error")
        try:
            self._refuse_error(error, type(error).__name__)
        except RuntimeError:
            await member.rubric.cleanup(state)
            raise
        return Played(None, {}, state["trajectory"], (member, state))

    def _member(self, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return the environment that plays a row, of a group the member, and the row in its
        form.
        """
        member: Any = self._environment
        while isinstance(member, self._group):
            name, row, _ = member._route_child_input(row)
            member = member.get_env_for_name(name)
        return member, row

    def _refuse_error(self, error: Any, kind: str | None) -> None:
        if error is not None and kind != EMPTY_REPLY:
            shown = error if isinstance(error, Mapping) else repr(error)
            raise RuntimeError(f"{self._path} ended the rollout: {shown!s:.300}")


async def score_together(played: Sequence[Played]) -> list[Played]:
    """Return rollouts of one row with the scores that the environment's rubric gives them as a
    group. Raises Refused if its functions do not return a number for each.
    """
    unscored = [one.unscored for one in played if one.unscored is not None]
    member, states = unscored[0][0], [state for _, state in unscored]
    rubric = member.rubric
    try:
        await (rubric.score_group if member.score_rollouts else rubric.dummy_score_group)(states)
        return [
            Played(*_score_of(state), one.trace) for one, state in zip(played, states, strict=True)
        ]
    except (IndexError, TypeError) as error:  # what a function raises itself counts as 0
        together = [f.__name__ for f in rubric._get_reward_funcs() if rubric._is_group_func(f)]
        raise Refused(
            f"the environment cannot add up the rewards of its functions ({error}): expected of "
            f"{', '.join(together)} a list with a number for each of the {len(states)} rollouts"
        ) from error
    finally:
        for state in states:
            await rubric.cleanup(state)


def _score_of(ended: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    numbers = {name: float(number) for name, number in (ended.get("metrics") or {}).items()}
    return float(ended["reward"] or 0.0), numbers


@lru_cache(maxsize=16)
def environment(path: str) -> Environment:
    """Return the environment of `verifiers:NAME?OPTIONS`."""
    return Environment(path)


def made_rows(path: str) -> Problems | Environment:
    """Return the rows of a path that is `generated`."""
    return environment(path) if path.startswith(VERIFIERS) else problems(path)


class GeneratedRows:
    """The row source for generators of problems."""

    reproducible = True

    def takes(self, data: DataSet) -> bool:
        """Return whether the path names a generator."""
        return generated(data.path) is not None

    def files(self, data: DataSet) -> list[Path]:
        """Return none: the rows are generated."""
        return []

    def read(self, data: DataSet) -> Rows:
        """Generate the rows. The only split is `train`, which cannot be sliced."""
        if data.split != "train":
            reason = f"has no split '{data.split}': give another seed in place of a split"
            raise NoRows(data.path, reason)
        made: Any = made_rows(data.path)
        return Rows(f"dataset '{data.path}'", made, COLUMNS)
