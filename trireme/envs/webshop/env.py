"""Env: one customer in the shop: `search[...]`, `click[...]`, and a reward at `click[buy now]`.

The shop (products, goals, index) is shared by all customers and never changes; a session is a few
fields. One difference from the original: a session that has bought takes no further action, where
the original could buy, and pay, a second time.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from trireme.envs.webshop.catalogue import (
    Goal,
    Product,
    human_goals,
    load_products,
    synthetic_goals,
)
from trireme.envs.webshop.pages import (
    SUB_PAGES,
    Session,
    clickables,
    nodes,
    plain_text,
    rich_text,
)
from trireme.envs.webshop.reward import Nouns, reward, simple_nouns, spacy_nouns
from trireme.envs.webshop.search import MAX_HITS, Search

_ACTION = re.compile(r"(.+)\[(.+)\]")
HOW = (
    "set it to the folder with items_shuffle*.json, items_ins_v2*.json and items_human_ins.json "
    "(python -m trireme.envs.webshop.make_catalogue FOLDER makes one)"
)


@dataclass
class Shop:
    """What all sessions share."""

    products: Sequence[Product]
    goals: Sequence[Goal]
    nouns: Nouns = simple_nouns
    seed: int = 0
    sessions: dict[str, Goal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_asin = {product.asin: product for product in self.products}
        self._source = random.Random(self.seed)

    @cached_property
    def search(self) -> Search:
        """The index; made when the first query comes."""
        return Search(self.products)

    def goal_of(self, session: int | str | None, prefix: str = "") -> Goal:
        """The goal of a session: by its number, else drawn by weight. A known key keeps its goal.

        Raises IndexError past the last goal.
        """
        if session is None:
            session = "".join(self._source.choices("abcdefghijklmnopqrstuvwxyz", k=10))
        key = f"{prefix}{session}"
        if key not in self.sessions:
            if isinstance(session, int):
                if session >= len(self.goals):
                    raise IndexError(f"session {session}: the shop has {len(self.goals)} goals")
                self.sessions[key] = self.goals[session]
            else:
                weights = [goal.weight for goal in self.goals]
                self.sessions[key] = self._source.choices(self.goals, weights)[0]
        return self.sessions[key]

    def find(self, keywords: Sequence[str]) -> Sequence[str]:
        """ASINs for a query; its first word may be <r> (random), <a>, <c> or <q>."""
        first, rest = keywords[0], " ".join(keywords[1:])
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
        observation_mode: Literal["text", "text_rich"] = "text_rich",
        show_attrs: bool = False,
        num_prev_obs: int = 0,
        num_prev_actions: int = 0,
        session_prefix: str = "",
        session: int | str | None = None,
    ) -> None:
        """`session` is what `reset` takes where it is given none."""
        if observation_mode not in ("text", "text_rich"):
            raise ValueError(f"observation_mode is '{observation_mode}': expected text, text_rich")
        self.shop = shop
        self._rich = observation_mode == "text_rich"
        self._show_attributes = show_attrs
        self._previous = num_prev_obs, num_prev_actions
        self._prefix, self._default = session_prefix, session
        self._seen: list[str] = []
        self._acted: list[str] = []

    def reset(self, session: int | str | None = None) -> tuple[str, None]:
        """The shop's first page with the instruction of the session."""
        asked = self._default if session is None else session
        self.session = Session(self.shop.goal_of(asked, self._prefix))
        self._seen, self._acted = [], []
        return self._observe(), None

    def step(self, action: str) -> tuple[str, float, bool, None]:
        """What the page shows now. An action that is not possible changes nothing."""
        bought = False
        found = _ACTION.match(action)
        if found and self.session.view != "done":
            name, argument = found[1], found[2].lower()
            if name == "search":
                self._search(argument.split(" "))
            elif name == "click" and argument != "search" and argument in self._clickables():
                bought = self._click(argument)
        self._acted.append(action)
        return self._observe(), self.session.reward if bought else 0, bought, None

    def get_available_actions(self) -> dict[str, Any]:
        """Whether there is a search bar, and what can be clicked."""
        return {
            "has_search_bar": self.session.view == "index",
            "clickables": self._clickables(),
        }

    @property
    def instruction_text(self) -> str:
        """What the customer wants."""
        return self.session.goal.instruction_text

    def close(self) -> None:
        """Nothing is held."""

    def _search(self, keywords: list[str]) -> None:
        s = self.session
        s.view, s.keywords, s.page, s.product = "results", keywords, 1, None
        s.hits, s.options = self.shop.find(keywords), {}

    def _click(self, name: str) -> bool:
        """Follow a button; whether it was a purchase."""
        s = self.session
        if name == "back to search":
            self.session = Session(s.goal)
        elif name == "next >":
            s.page += 1
        elif name == "< prev" and s.view == "results":
            s.page -= 1
        elif name == "< prev" and s.view == "item":
            s.view, s.product, s.options = "results", None, {}
        elif name == "< prev":
            s.view = "item"
        elif s.view == "results":
            asin = next(a for a in s.shown if a.lower() == name)
            s.view, s.product = "item", self.shop.by_asin[asin]
            s.visited.add(asin)
        elif option := self._option(name):
            s.options[option] = name
        elif name in SUB_PAGES:
            s.view = name
        elif name == "buy now":
            return self._buy()
        return False

    def _option(self, value: str) -> str | None:
        """The option that a value belongs to; the last one where several have it."""
        product = self.session.product
        assert product is not None
        names = [name for name, values in product.options.items() if value in values]
        return names[-1] if names and self.session.view == "item" else None

    def _buy(self) -> bool:
        s = self.session
        assert s.product is not None
        s.reward, _ = reward(s.product, s.goal, s.options, self.shop.nouns)
        s.view = "done"
        return True

    def _clickables(self) -> list[str]:
        return clickables(self.session, self._nodes())

    def _nodes(self) -> list[Any]:
        return list(nodes(self.session, self.shop.by_asin, self._show_attributes))

    def _observe(self) -> str:
        found = self._nodes()
        now = rich_text(self.session, found) if self._rich else plain_text(found)
        shown = [now]
        most_seen, most_acted = self._previous
        for i in range(1, 1 + max(self._previous)):
            if i <= min(most_acted, len(self._acted)):
                shown.append(self._acted[-i])
            if i <= min(most_seen, len(self._seen)):
                shown.append(self._seen[-i])
        self._seen.append(now)
        return " [SEP] ".join(reversed(shown))


@lru_cache(maxsize=4)
def open_shop(folder: str | None = None, *, human: bool = True, seed: int = 0) -> Shop:
    """The shop of a folder, else of $WEBSHOP_DATA; loaded once in a process.

    Raises ValueError saying what to do where it is not there.
    """
    path = folder or os.environ.get("WEBSHOP_DATA")
    if not path:
        raise ValueError(f"WEBSHOP_DATA is not set: {HOW}")
    if not Path(path).is_dir():
        raise ValueError(f"WEBSHOP_DATA is {path}: there is no such folder; {HOW}")
    items, about, people = (
        _only(Path(path), pattern)
        for pattern in ("items_shuffle*.json", "items_ins_v2*.json", "items_human_ins*.json")
    )
    products = load_products(items, about, seed)
    goals = human_goals(products, people, seed) if human else synthetic_goals(products, seed)
    if not goals:
        raise ValueError(f"{people}: no product of {items.name} has an instruction in it")
    return Shop(products, goals, spacy_nouns(), seed)


def _only(folder: Path, pattern: str) -> Path:
    """The file of a pattern; the first by name where there are several sizes."""
    found = sorted(folder.glob(pattern))
    if not found:
        raise ValueError(f"WEBSHOP_DATA is {folder}: it has no {pattern}; {HOW}")
    return found[0]
