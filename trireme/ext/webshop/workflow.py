"""WebShop workflow: a customer with an instruction, as one conversation or step by step.

`format.prompt_key` names the column with the session's number. `workflow_args`: data (the folder,
default $WEBSHOP_DATA), original (true: the package web_agent_site; auto: that where it is
installed), sparse (a reward of 1 or 0 in place of the shop's share), per_step, nouns (see
`noun_tagger`); and as the original calls them human_goals, num_products, limit_goals,
observation_mode (text, text_rich, html, url), show_attrs.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

from trireme.envs.env import Seen
from trireme.ext.webshop.env import OriginalEnv, WebShopEnv, num_goals, open_shop
from trireme.task import Task
from trireme.workflows.episode import EpisodeWorkflow, Steps, row_number

_PROMPT = """You shop online for a customer, through text pages. Find and buy what the \
instruction asks for, within {steps} actions.

Before each action think briefly. Answer with your thoughts between <think> and </think> and one \
action between <action> and </action>.

The actions:
search[words]   where the page has a search bar
click[name]     any button or option of the page, by its name

Choose the options that the instruction asks for before you click[buy now]. An example:
<think>I begin with what it is and its colour.</think>
<action>search[navy blue table lamp]</action>"""
ACTIONS = 15
"""Most actions of an episode, unless `workflow_args.max_env_steps` overrides it."""
SYSTEM_PROMPT = _PROMPT.format(steps=ACTIONS)


def format_observation(observation: str) -> str:
    """Return the user's message for a page."""
    return f"Observation: {observation.strip()}"


class _Checked:
    """A shop that explains why an action is impossible, instead of showing the page again."""

    def __init__(self, env: Any, session: int) -> None:
        self._env, self._session = env, session

    def reset(self) -> Any:
        return self._env.reset(session=self._session)

    def step(self, action: str) -> Any:
        if problem := self._problem(action):
            return problem, 0.0, False, {"valid": False}
        observation, reward, done, _ = self._env.step(action)
        return observation, reward, done, {"valid": True}

    def close(self) -> None:
        self._env.close()

    def _problem(self, action: str) -> str | None:
        can = self._env.get_available_actions()
        name, _, rest = action.partition("[")
        argument = rest.removesuffix("]").strip().lower()
        if name not in ("search", "click") or not rest.endswith("]") or not argument:
            return "Write search[words] or click[name]."
        if name == "search":
            return None if can["has_search_bar"] else "This page has no search bar."
        if argument in can["clickables"]:
            return None
        return f"There is nothing called '{argument}' here. You can click: " + ", ".join(
            can["clickables"]
        )


class WebShopWorkflow(EpisodeWorkflow):
    """The reward is the shop's, 0 to 1, at the purchase; -0.1 where nothing was bought."""

    blocking_env = False
    max_env_steps = ACTIONS
    tagged_actions = True
    examines_rows = True
    workflow_options: Mapping[str, Any] | None = {
        **{"max_env_steps": Steps, "per_step": bool, "sparse": bool, "show_attrs": bool},
        **{
            "original": bool | Literal["auto"],
            "data": str | None,
            "nouns": str,
            "human_goals": bool,
        },
        **{"num_products": int | None, "limit_goals": int},
        "observation_mode": Literal["text", "text_rich", "html", "url"],
    }

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """Name the packages that our own shop needs; the original brings its own."""
        ours = not _original(task)
        return dict.fromkeys(("Stemmer", "rapidfuzz"), "the WebShop environment") if ours else {}

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a row without a session's number, if there are no products, and for
        a session that our shop does not have.
        """
        number = row_number(task)
        if cls.make_env is WebShopWorkflow.make_env and not _original(task):
            goals = num_goals(**_shop(task))
            if not 0 <= number < goals:
                raise ValueError(
                    f"the row's column '{task.prompt_key}' (format.prompt_key) is {number}, and "
                    f"the shop has {goals} goals: expected a session from 0 to {goals - 1}"
                )

    def bind(self, task: Task) -> None:
        """Set the attributes that users' methods read from the task."""
        super().bind(task)
        self.system_prompt = self.system_prompt or _PROMPT.format(steps=self.max_env_steps)
        self.per_step = bool(task.workflow_args.get("per_step", False))
        self.original = _original(task)
        self.blocking_env = self.original  # ours takes no time

    def make_env(self) -> Any:
        """Open a session of the shop."""
        args, session = self.workflow_args, row_number(self.task)
        human, products = bool(args.get("human_goals", True)), args.get("num_products")
        limit, page = int(args.get("limit_goals", -1)), args.get("observation_mode", "text_rich")
        attributes = bool(args.get("show_attrs", False))
        if self.original:
            env: Any = OriginalEnv(
                observation_mode=page,
                human_goals=human,
                num_products=products,
                limit_goals=limit,
                show_attrs=attributes,
            )
        else:
            env = WebShopEnv(
                open_shop(**_shop(self.task)), observation_mode=page, show_attrs=attributes
            )
        return _Checked(env, session)

    def format_observation(self, seen: Seen) -> str:
        """Return the page."""
        return format_observation(str(seen.observation))

    def final_reward(self, seen: Seen, total: float) -> float:
        """Return the episode's reward; `sparse` turns 0.99 and more into 1, and less into 0."""
        reward = super().final_reward(seen, total)
        if self.workflow_args.get("sparse") and reward >= 0:
            return float(reward >= 0.99)
        return reward


def _shop(task: Task) -> dict[str, Any]:
    """Return which shop the YAML asks for: the arguments of `open_shop`."""
    args = task.workflow_args
    return {
        "folder": args.get("data"),
        "human": bool(args.get("human_goals", True)),
        "nouns": args.get("nouns", "auto"),
        "num_products": args.get("num_products"),
        "limit_goals": int(args.get("limit_goals", -1)),
    }


def _original(task: Task) -> bool:
    """Return whether the YAML asks for the package web_agent_site."""
    asked = task.workflow_args.get("original", False)
    if asked not in (True, False, "auto"):
        raise ValueError(f"workflow_args.original is {asked!r}: expected true, false or auto")
    return find_spec("web_agent_site") is not None if asked == "auto" else asked
