"""Env: one customer in the shop: `search[...]`, `click[...]`, and a reward at `click[buy now]`.

The shop (products, goals, index) is shared by all customers and never changes; a session is a few
fields. One difference from the original: a session that has bought takes no further action, where
the original could buy, and pay, a second time.

`OriginalEnv` is a session of the package web_agent_site, if a user has installed it. Its products
are loaded once in a process, for all sessions. Its goals draw their price limits from Python's
global random source before the package seeds it: it is seeded here first, so that every process has
the same texts, and restored.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, Literal
from uuid import uuid4

from trireme.ext.webshop.catalogue import (
    Filter,
    Goal,
    Product,
    chosen_goals,
    count_goals,
    draw,
    human_goals,
    load_products,
    synthetic_goals,
    weight_steps,
)
from trireme.ext.webshop.pages import (
    SUB_PAGES,
    Node,
    ShopSession,
    clickables,
    html,
    nodes,
    plain_text,
    rich_text,
)
from trireme.ext.webshop.reward import Nouns, noun_tagger, reward, simple_nouns
from trireme.ext.webshop.search import MAX_HITS, Search

_ACTION = re.compile(r"(.+)\[(.+)\]")
HOW = (
    "set it to the folder with items_shuffle*.json, items_ins_v2*.json and items_human_ins.json "
    "(python -m trireme.ext.webshop.make_catalogue FOLDER makes one)"
)


@dataclass
class Shop:
    """The data that all sessions share."""

    products: Sequence[Product]
    goals: Sequence[Goal]
    nouns: Nouns = simple_nouns
    seed: int = 0
    sessions: dict[str, Goal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_asin = {product.asin: product for product in self.products}
        self._source = random.Random(self.seed)
        self._steps = weight_steps(self.goals)

    @cached_property
    def search(self) -> Search:
        """The index; made for the first query."""
        return Search(self.products)

    def session(self, name: int | str | None, prefix: str = "") -> ShopSession:
        """Open a session on the first page. Its goal is that of its number, else drawn by weight; a
        known key keeps its goal.

        Raises IndexError past the last goal.
        """
        if name is None:
            name = "".join(self._source.choices("abcdefghijklmnopqrstuvwxyz", k=10))
        key = f"{prefix}{name}"
        if key not in self.sessions:
            number = name if isinstance(name, int) else draw(self._steps, self._source)
            if number >= len(self.goals):
                raise IndexError(f"session {name}: the shop has {len(self.goals)} goals")
            self.sessions[key] = self.goals[number]
        return ShopSession(key, self.sessions[key])

    def find(self, keywords: Sequence[str]) -> Sequence[str]:
        """Return ASINs for a query; its first word may be <r> (random), <a>, <c> or <q>."""
        first, rest = keywords[0], " ".join(keywords[1:]).strip()
        if first == "<r>":
            asins = [product.asin for product in self.products]
            return self._source.sample(asins, min(MAX_HITS, len(asins)))
        if first == "<a>":
            return [p.asin for p in self.products if rest in p.attributes]
        if first == "<c>":
            return [p.asin for p in self.products if p.category == (keywords[1:] or [""])[0]]
        if first == "<q>":
            return [p.asin for p in self.products if p.query == rest]
        return self.search.hits(" ".join(keywords))


class WebShopEnv:
    """The original's interface: `reset(session)`, `step(action)`, `get_available_actions()`."""

    def __init__(
        self,
        shop: Shop,
        *,
        observation_mode: Literal["text", "text_rich", "html", "url"] = "text_rich",
        show_attrs: bool = False,
        num_prev_obs: int = 0,
        num_prev_actions: int = 0,
        session_prefix: str = "",
        session: int | str | None = None,
    ) -> None:
        """`session` is the default argument of `reset`."""
        if observation_mode not in _MODES:
            raise ValueError(
                f"observation_mode is '{observation_mode}': expected {', '.join(_MODES)}"
            )
        self.shop = shop
        self._form = _MODES[observation_mode]
        self._show_attributes = show_attrs
        self._previous = num_prev_obs, num_prev_actions
        self._prefix, self._default = session_prefix, session
        self._seen: list[str] = []
        self._acted: list[str] = []

    def reset(
        self, session: int | str | None = None, instruction_text: str | None = None
    ) -> tuple[str, None]:
        """Return the shop's first page with the instruction of the session.

        `instruction_text` replaces the session's in the attribute of that name, and changes no
        page.
        """
        asked = self._default if session is None else session
        self.session = self.shop.session(asked, self._prefix)
        self._seen, self._acted = [], []
        said = f"Instruction: {self.session.goal.instruction_text}"
        self.instruction_text = said if instruction_text is None else instruction_text
        return self._observe(), None

    def step(self, action: str) -> tuple[str, float, bool, None]:
        """Return the page after the action. An impossible action changes nothing."""
        bought = False
        match = _ACTION.match(action)
        if match and self.session.view != "done":
            name, argument = match[1], match[2].lower()
            if name == "search":
                self._search(argument.split(" "))
            elif name == "click" and argument != "search" and argument in self._clickables():
                bought = self._click(argument)
        self._acted.append(action)
        return self._observe(), self.session.reward if bought else 0, bought, None

    def get_available_actions(self) -> dict[str, Any]:
        """Return whether there is a search bar, and the texts that can be clicked."""
        return {
            "has_search_bar": self.session.view == "index",
            "clickables": self._clickables(),
        }

    @property
    def state(self) -> dict[str, str]:
        """Return the page's address, its HTML, and the customer's instruction."""
        nodes = self._nodes()
        return {
            "url": self.session.address,
            "html": html(nodes),
            "instruction_text": self.instruction_text,
        }

    @property
    def observation(self) -> str:
        """Return the page in the form of `observation_mode`."""
        return self._form(self.session, self._nodes())

    def close(self) -> None:
        """Do nothing."""

    def _search(self, keywords: list[str]) -> None:
        s = self.session
        s.view, s.keywords, s.page, s.product = "results", keywords, 1, None
        s.hits, s.options = self.shop.find(keywords), {}

    def _click(self, name: str) -> bool:
        """Follow a button; returns whether it was a purchase. A button has precedence over an
        option of its name, on the pages on which the original knows it.
        """
        s = self.session
        if name == "buy now":
            return self._buy()
        if name == "back to search":
            self.session = ShopSession(s.key, s.goal)
        elif name in ("next >", "< prev") and s.view == "results":
            s.page += 1 if name == "next >" else -1
            self._search_again()
        elif name == "< prev" and s.view == "item":
            s.view, s.product, s.options = "results", None, {}
            self._search_again()
        elif name == "< prev":
            s.view = "item"
        elif name in SUB_PAGES:
            s.view = name
        elif s.view == "results":
            asin = next(a for a in s.shown if a.lower() == name)
            s.view, s.product = "item", self.shop.by_asin[asin]
            s.visited.add(asin)
        elif option := self._option(name):
            s.options[option] = name
        return False

    def _search_again(self) -> None:
        """Search again: every page of results is a separate search, which matters for drawn
        products.
        """
        if self.session.keywords[0] == "<r>":
            self.session.hits = self.shop.find(self.session.keywords)

    def _option(self, value: str) -> str | None:
        """Return the option that a value belongs to; the last one if several have it."""
        product = self.session.product
        assert product is not None
        names = [name for name, values in product.options.items() if value in values]
        return names[-1] if names else None

    def _buy(self) -> bool:
        s = self.session
        assert s.product is not None
        s.reward, s.reward_info = reward(s.product, s.goal, s.options, self.shop.nouns)
        s.view = "done"
        return True

    def _clickables(self) -> list[str]:
        return clickables(self.session, self._nodes())

    def _nodes(self) -> list[Node]:
        return list(nodes(self.session, self.shop.by_asin, self._show_attributes))

    def _observe(self) -> str:
        now = self.observation
        shown = [now]
        most_seen, most_acted = self._previous
        for i in range(1, 1 + max(self._previous)):
            if i <= min(most_acted, len(self._acted)):
                shown.append(self._acted[-i])
            if i <= min(most_seen, len(self._seen)):
                shown.append(self._seen[-i])
        self._seen.append(now)
        return " [SEP] ".join(reversed(shown))


_MODES: dict[str, Callable[[ShopSession, Sequence[Node]], str]] = {
    "text": lambda session, found: plain_text(found),
    "text_rich": lambda session, found: rich_text(found),
    "html": lambda session, found: html(found),
    "url": lambda session, found: session.address,
}


@lru_cache(maxsize=4)
def open_shop(
    folder: str | None = None,
    *,
    human: bool = True,
    seed: int = 0,
    nouns: str | Nouns = "auto",
    num_products: int | None = None,
    filter_goals: Filter | None = None,
    limit_goals: int = -1,
) -> Shop:
    """Open the shop of a folder, else of $WEBSHOP_DATA; loaded once per process.

    `nouns`: see `noun_tagger`. `num_products`: the number of rows of the file.
    `filter_goals(number, goal)`: whether a goal stays. `limit_goals`: the number of goals, drawn by
    weight.

    Raises ValueError with the remedy if it is missing.
    """
    items, about, people = shop_files(folder)
    source = random.Random(seed)
    products = load_products(items, about, source, num_products=num_products)
    goals = human_goals(products, people, source) if human else synthetic_goals(products, source)
    _refuse_no_goals(len(goals), items, people)
    goals = chosen_goals(goals, filter_goals, limit_goals)
    if not goals:
        raise ValueError(f"filter_goals and limit_goals={limit_goals} leave no goal of {people}")
    return Shop(products, goals, noun_tagger(nouns), seed)


@lru_cache(maxsize=4)
def num_goals(
    folder: str | None = None,
    *,
    human: bool = True,
    nouns: str = "auto",
    num_products: int | None = None,
    limit_goals: int = -1,
) -> int:
    """Return how many goals the shop of `open_shop` has, without opening it. Raises ValueError
    where that would.
    """
    items, about, people = shop_files(folder)
    count = count_goals(items, about, people, human=human, num_products=num_products)
    _refuse_no_goals(count, items, people)
    if limit_goals >= 0:
        count = min(count, limit_goals)
    if not count:
        raise ValueError(f"limit_goals={limit_goals} leaves no goal of {people}")
    if nouns != "auto":  # which is never wrong, and may take seconds to load
        noun_tagger(nouns)
    return count


def _refuse_no_goals(count: int, items: Path, people: Path) -> None:
    if not count:
        raise ValueError(f"{people}: no product of {items.name} has an instruction in it")


def shop_files(folder: str | None) -> list[Path]:
    """Return the files of products, attributes and instructions in a folder, else in $WEBSHOP_DATA.

    Raises ValueError with the remedy if one is missing.
    """
    path = folder or os.environ.get("WEBSHOP_DATA")
    if not path:
        raise ValueError(f"WEBSHOP_DATA is not set: {HOW}")
    if not Path(path).is_dir():
        raise ValueError(f"WEBSHOP_DATA is {path}: there is no such folder; {HOW}")
    patterns = ("items_shuffle*.json", "items_ins_v2*.json", "items_human_ins*.json")
    return [_only(Path(path), pattern) for pattern in patterns]


def _only(folder: Path, pattern: str) -> Path:
    """Return the file of a pattern; the first by name if there are several sizes."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise ValueError(f"WEBSHOP_DATA is {folder}: it has no {pattern}; {HOW}")
    return files[0]


_loading = Lock()
_servers: dict[tuple[Any, ...], Any] = {}


class OriginalEnv:
    """A session of the original's `WebAgentTextEnv`, with `reset` and `step` as ours."""

    def __init__(
        self,
        *,
        observation_mode: str = "text_rich",
        human_goals: bool = True,
        num_products: int | None = None,
        limit_goals: int = -1,
        show_attrs: bool = False,
        seed: int = 0,
    ) -> None:
        """Raises ModuleNotFoundError with the remedy if the package is not installed."""
        try:
            make = import_module("web_agent_site.envs").WebAgentTextEnv
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "workflow_args.original is true, and the package web_agent_site is not installed: "
                f"leave it out to use the built-in shop [{error}]"
            ) from error
        loaded = {
            "human_goals": human_goals,
            "num_products": num_products,
            "limit_goals": limit_goals,
            "show_attrs": show_attrs,
        }
        key = (*loaded.values(), seed)
        with _loading:
            if key not in _servers:
                before = random.getstate()
                random.seed(seed)
                try:
                    _servers[key] = make(observation_mode=observation_mode, **loaded).server
                finally:
                    random.setstate(before)
        # a server identifies sessions by their names: those of a group have one number
        self._prefix, self._server = f"{uuid4().hex}-", _servers[key]
        self._env = make(
            observation_mode=observation_mode, server=self._server, session_prefix=self._prefix
        )

    def reset(self, session: int | str | None = None) -> tuple[str, None]:
        """Return the shop's first page."""
        return self._env.reset(session=session)

    def step(self, action: str) -> tuple[str, float, bool, None]:
        """Return the page after the action."""
        return self._env.step(action)

    def get_available_actions(self) -> dict[str, Any]:
        """Return whether there is a search bar, and the texts that can be clicked."""
        return self._env.get_available_actions()

    def close(self) -> None:
        """Remove the sessions from the server."""
        for name in list(self._server.user_sessions):  # a copy: other threads continue
            if name.startswith(self._prefix):
                del self._server.user_sessions[name]
        self._env.close()
