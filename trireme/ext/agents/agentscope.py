"""AgentScope: agents of the package `agentscope` as rollouts, over the rollout's own OpenAI client.

The package is imported when an agent is made. The model's sampling is the run's, whatever an agent
requests, and agents' messages are not printed. An agent's programs must be installed: none is
downloaded.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import BaseModel, Field

from trireme.aio import OutOfTime, is_async
from trireme.config.options import accepted, fitting_options
from trireme.envs.env import extra
from trireme.experience import Experience
from trireme.ext.external_model.asker import judged_right, refuse_no_truth
from trireme.ext.multi_turn.tool_calls import Tool, as_text, python_tool
from trireme.model.blocking import BlockingModel
from trireme.model.conversation import with_metrics
from trireme.registry import Registry, signature_of
from trireme.rewards.grouped import is_grouped
from trireme.rewards.reward import examine_columns, number, resolve, score
from trireme.task import Task
from trireme.usercode import Refused, UserCode
from trireme.workflows.classes import Workflow

_FUNCTIONS = Registry("agentscope function")
"""All of them are users' own, by path."""
MATH = (
    "Solve the problem. Run Python where a calculation helps. Finish with the result alone, within "
    "\\boxed{}."
)
SEARCH = (
    "Answer the question from the web. Search it, read what looks right, and follow its links; if "
    "it is not there, search for something else."
)
TOOL_LIMIT_S = 30.0


def chat_model(model: Any) -> Any:
    """Make an `OpenAIChatModel` of agentscope that calls a rollout's model: its calls are recorded.

    Raises ModuleNotFoundError saying how to install the package.
    """
    os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")
    agents = _agentscope("model")
    client = model.get_openai_async_client()
    made = agents.OpenAIChatModel(client.model_path or "model", api_key="EMPTY", stream=False)
    made.client = client
    if isinstance(model, BlockingModel):
        model.model.keeps_sampling = True
    return made


class AgentScopeWorkflow(Workflow):
    """An `async` function `(task, model)` as AgentScope's tuner takes it.

    `workflow_args`: `workflow_func`, which returns a `WorkflowOutput` or the reward alone; and
    `judge_func` `(task, response)`, which returns a `JudgeOutput`. Both by path (`my_file:name`);
    both may also name `auxiliary_models` and `logger`.
    """

    async def run(self) -> list[Experience]:
        """Call the function, and its judge."""
        play, judge = functions_of(self.task)
        others = self.auxiliary_model_wrappers
        there = {
            "task": self.raw_task,
            "model": chat_model(self.model),
            "auxiliary_models": {Path(m.model_path).name: chat_model(m) for m in others},
            "logger": self.logger,
        }
        reward, metrics, response = await _called("workflow_func", play, there)
        if judge is not None:
            there = {**there, "response": response}
            reward, more, _ = await _called("judge_func", judge, there)
            metrics |= more
        if reward is None:
            raise Refused(
                f"workflow_func '{play.__name__}' gave no reward: expected a WorkflowOutput with "
                "one, or workflow_args.judge_func"
            )
        return _experiences(self.model, reward, metrics)

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for functions that do not exist, or if the package is missing."""
        functions_of(task)
        if task.reward_fn is not None:
            raise ValueError(
                f"default_reward_fn_type is {task.reward_fn!r}, which this workflow does not "
                "use: its reward comes from workflow_args.workflow_func, or "
                "workflow_args.judge_func"
            )
        _agentscope("model")


@dataclass(frozen=True)
class Functions:
    """`workflow_args` of the adapter."""

    workflow_func: Any
    judge_func: Any = None


@dataclass(frozen=True)
class Settings:
    """`workflow_args` of the agent."""

    type: Literal["gsm8k"] = "gsm8k"
    """Trinity's name for the kind of task; there is one."""
    tools: Sequence[Any] = ("python",)
    """Names as for tool_call_scheduler, or paths of functions."""
    max_iters: Annotated[int, Ge(1)] = 10
    """Most turns."""


class AgentScopeReActWorkflow(Workflow):
    """AgentScope's ReActAgent on a mathematical question, with tools.

    Its answer is what it passes to `generate_response`, the tool that ends its work. The reward
    is the task's, else `math_boxed_reward`. Python runs in the sandbox.
    """

    reward_parts = True
    settings: type[Settings] = Settings

    async def run(self) -> list[Experience]:
        """Let the agent work, and judge its answer."""
        answer, remembered = await self.ask()
        reward = resolve(*_reward_of(self.task))
        assert reward is not None
        models, notes = self.auxiliary_model_wrappers, dict[str, float]()
        parts = await score(self.task, answer, reward, (), models, notes=notes)
        metrics = {"react_memory_length": float(remembered), **notes, **parts}
        experiences = _experiences(self.model, sum(parts.values()), metrics)
        for experience in experiences:
            experience.info["reward_parts"] = {name: (part, 1.0) for name, part in parts.items()}
        return experiences

    async def ask(self) -> tuple[str, int]:
        """Return the agent's answer, and the number of messages in its memory."""
        settings = _settings(self.settings, self.task)
        toolkit = _agentscope("tool").Toolkit()
        for tool in map(python_tool, settings.tools):
            toolkit.register_tool_function(_as_agentscope(tool), json_schema=tool.schema)
        return await _answered(
            self, self.system_prompt or MATH, toolkit, settings.max_iters, Answer
        )

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a wrong option, or if the package is not installed."""
        settings = _settings(cls.settings, task)
        _refuse_messages(task)
        for tool in settings.tools:
            python_tool(tool)
        name, args = _reward_of(task)
        if is_grouped(name, args):
            raise ValueError(
                f"default_reward_fn_type is {name!r}, which scores whole groups: the agentscope "
                "agent expects a reward for a single answer"
            )
        if (reward := resolve(name, args)) is not None:
            examine_columns(task, reward)
        _agentscope("agent")


@dataclass(frozen=True)
class OldSettings(Settings):
    """`workflow_args` of the agent under its old name."""

    max_iters: Annotated[int, Ge(1)] = 5


class AgentScopeOldReActWorkflow(AgentScopeReActWorkflow):
    """The same under the name that it has with AgentScope 0.1: on AgentScope 1, in 5 turns."""

    settings = OldSettings


@dataclass(frozen=True)
class SearchSettings:
    """`workflow_args` of the search agent."""

    search_client_type: Literal["searxng", "tavily"] = "searxng"
    """Whose MCP server gives the tools: `mcp-searxng` or `tavily-mcp`, as npm installs them."""
    max_turns: Annotated[int, Ge(1)] = 10
    """Most turns."""
    max_model_tokens: Annotated[int, Ge(1)] = 24000
    """Longer experiences are left out."""

    @property
    def program(self) -> tuple[str, str]:
        """The MCP server, and the environment variable that it needs."""
        if self.search_client_type == "searxng":
            return "mcp-searxng", "SEARXNG_URL"
        return "tavily-mcp", "TAVILY_API_KEY"


class AgentScopeSearchWorkflow(Workflow):
    """AgentScope's ReActAgent on a question that the web answers, with the tools of an MCP server.

    The first of `explorer.auxiliary_models` says whether its answer is the truth: 1 or 0.
    """

    async def run(self) -> list[Experience]:
        """Let the agent search, and judge its answer."""
        settings = _settings(SearchSettings, self.task)
        program, variable = settings.program
        client = _agentscope("mcp").StdIOStatefulClient(
            name=program, command=_installed(program), env={variable: os.environ[variable]}
        )
        toolkit = _agentscope("tool").Toolkit()
        await client.connect()
        try:
            await toolkit.register_mcp_client(client)
            system = self.system_prompt or SEARCH
            answer, remembered = await _answered(self, system, toolkit, settings.max_turns, Found)
        finally:
            await client.close()
        right = bool(answer) and await judged_right(
            self.task, answer, self.auxiliary_model_wrappers
        )
        metrics = {"react_turns": float(remembered // 2), "max_turns": float(settings.max_turns)}
        made = _experiences(self.model, float(right), metrics)
        return [e for e in made if len(e.tokens) <= settings.max_model_tokens]

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a wrong option, and for anything that is not installed or
        not set.
        """
        settings = _settings(SearchSettings, task)
        _refuse_messages(task)
        if task.reward_fn is not None:
            raise ValueError(
                f"default_reward_fn_type is {task.reward_fn!r}, which this workflow does not "
                "use: the first of explorer.auxiliary_models judges the answer"
            )
        refuse_no_truth(task)
        _agentscope("mcp")
        program, variable = settings.program
        _installed(program)
        if not os.environ.get(variable):
            raise ValueError(
                f"workflow_args.search_client_type is '{settings.search_client_type}', and the "
                f"environment variable {variable} is not set, which {program} needs"
            )

    @classmethod
    def asks_a_model(cls, task: Task) -> bool:
        """Return True: its judge is one of `explorer.auxiliary_models`."""
        return True


class Answer(BaseModel):
    """What the agent passes to the tool that ends its work."""

    result: str = Field(description="The final result, within \\boxed{}: \\boxed{42} for example.")


class Found(BaseModel):
    """What the search agent passes to it."""

    result: str = Field(description="The answer to the question.")


async def _answered(
    asked: Workflow, system: str, toolkit: Any, turns: int, form: type[BaseModel]
) -> tuple[str, int]:
    """Return the answer of a ReActAgent to the task's prompt, and the number of messages in its
    memory.
    """
    agent = _agentscope("agent").ReActAgent(
        name="agent",
        sys_prompt=system,
        model=chat_model(asked.model),
        formatter=_agentscope("formatter").OpenAIChatFormatter(),
        toolkit=toolkit,
        max_iters=turns,
    )
    question = _agentscope("message").Msg("user", str(asked.task_desc), role="user")
    said = await agent.reply(question, structured_model=form)
    answer = (said.metadata or {}).get("result")
    remembered = await agent.memory.get_memory()
    return answer or said.get_text_content() or "", len(remembered)


def _refuse_messages(task: Task) -> None:
    if not isinstance(task.prompt, str):
        raise ValueError(
            f"the prompt ({task.prompt_key}) is {type(task.prompt).__name__}: the agentscope "
            "agent expects text"
        )


def _installed(program: str) -> str:
    """Return the path of an npm program. Raises ValueError if it is not installed."""
    if (path := shutil.which(program)) is None:
        raise ValueError(
            f"the search agent needs the program {program}, which is not on the PATH: "
            f"npm install -g {program}"
        )
    return path


def functions_of(task: Task) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Return the functions that `workflow_args` name. Raises ValueError for invalid ones."""
    settings = _settings(Functions, task)
    play = _function("workflow_func", settings.workflow_func, ("task", "model"))
    if settings.judge_func is None:
        return play, None
    return play, _function("judge_func", settings.judge_func, ("task", "response"))


def _function(key: str, named: Any, names: Sequence[str]) -> Callable[..., Any]:
    function: Any = _FUNCTIONS.get(named) if isinstance(named, str) else named
    wanted = f"expected an async function ({', '.join(names)}), as my_file:name"
    if not callable(function) or not is_async(function):
        raise ValueError(f"workflow_args.{key} is {named!r:.60}: {wanted}")
    given = accepted(function, dict.fromkeys([*names, "auxiliary_models", "logger"]))
    try:
        signature_of(function).bind(**given)
        fits = set(names) <= set(given)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"workflow_args.{key} takes {signature_of(function)}: {wanted}")
    return function


async def _called(
    key: str, function: Callable[..., Any], there: Mapping[str, Any]
) -> tuple[float | None, dict[str, float], Any]:
    """Return reward, metrics and response of a function. Raises Refused for anything else."""
    whose = f"{key} '{function.__name__}'"
    with UserCode(whose, function):
        output = await function(**accepted(function, there))
    if output is None or isinstance(output, str):
        raise Refused(f"{whose} returned {output!r:.60}: expected a reward, or agentscope's output")
    reward = getattr(output, "reward", output) if hasattr(output, "metrics") else output
    total = None if reward is None else number(reward, f"{whose} gave the reward")
    metrics = getattr(output, "metrics", None) or {}
    named = {str(k): number(v, f"{whose} gave for '{k}'") for k, v in metrics.items()}
    return total, named, getattr(output, "response", None)


def _experiences(
    model: BlockingModel, reward: float, metrics: dict[str, float]
) -> list[Experience]:
    experiences = model.model.experiences(reward)
    with_metrics(experiences, metrics)
    return experiences


def _reward_of(task: Task) -> tuple[Any, dict[str, Any]]:
    return task.reward_fn or "math_boxed_reward", dict(task.reward_fn_args)


def _agentscope(module: str) -> Any:
    _refuse_other_version()
    found = extra(f"agentscope.{module}", "AgentScope", "agentscope")
    log = logging.getLogger("as")
    if log.level == logging.INFO:  # its default, which has a line for each tool of each rollout
        log.setLevel(logging.WARNING)
    return found


@lru_cache(maxsize=1)
def _refuse_other_version() -> None:
    """Raise ImportError for AgentScope 0.1 and 2, whose modules have the same names."""
    try:
        version = metadata.version("agentscope")
    except metadata.PackageNotFoundError:
        return  # the import reports how to install it
    if version.partition(".")[0] != "1":
        raise ImportError(
            f"agentscope {version} is installed, and AgentScope 1 is needed: pip install "
            "'trireme-rl[agentscope]'"
        )


def _as_agentscope(tool: Tool) -> Callable[..., Any]:
    """Convert a tool for agentscope's Toolkit. Its error is its result."""
    message, toolkit = _agentscope("message"), _agentscope("tool")

    async def call(**arguments: Any) -> Any:
        try:
            text = as_text(await tool.call(arguments, TOOL_LIMIT_S))
        except OutOfTime:
            text = f"Error: {tool.name} took longer than {TOOL_LIMIT_S:g} s"
        except Exception as raised:  # foreign code: the model gets the error
            text = f"Error: {raised!s}" if str(raised) else f"Error: {raised!r}"
        return toolkit.ToolResponse([message.TextBlock(type="text", text=text)])

    call.__name__ = tool.name
    return call


def _settings(kind: Any, task: Task) -> Any:
    return kind(**fitting_options("workflow_args", kind, task.workflow_args))
