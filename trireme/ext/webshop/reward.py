"""Reward: scores how well a purchase meets a goal, from 0 to 1, by the rules of the original.

total = type * (attributes met + options met + price met) / (attributes + options + 1)

`type` compares title nouns, queries and categories. The nouns come from a tagger that may be
replaced: scores then differ a little.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from trireme.envs.env import extra
from trireme.ext.webshop.catalogue import Goal, Product
from trireme.ext.webshop.search import STOP_WORDS

Nouns = Callable[[str], Sequence[str]]
MATCH = 85
COLORS = re.findall(
    r"\w+",
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze "
    "brown burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate "
    "christmas coffee cognac copper coral cranberry cream crystal dark denim eggplant "
    "elephant espresso fuchsia gold granite grape graphite grass gray green grey heather "
    "indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve "
    "merlot midnight mint mocha multicolor mushroom mustard natural navy nude olive orange "
    "peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell silver "
    "skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut "
    "wheat white wine yellow",
)


def reward(
    bought: Product, goal: Goal, options: Mapping[str, str], nouns: Nouns
) -> tuple[float, dict[str, Any]]:
    """Return the reward of buying a product with these options, and its parts."""
    kind = type_score(bought, goal, nouns)
    attributes = sum(attribute_met(wanted, bought) for wanted in goal.attributes)
    wanted = goal_options(goal)
    chosen = [normalize_color(value) for value in options.values()]
    met = sum(any(close(value, have) for have in chosen) for value in wanted)
    affordable = bought.price <= goal.price_upper
    count = len(goal.attributes) + len(wanted) + 1
    total = (attributes + met + affordable) / count
    parts: dict[str, Any] = {
        **kind,
        "r_att": attributes / len(goal.attributes) if goal.attributes else 0.0,
        "w_att": len(goal.attributes) / count,
        "r_price": affordable,
        "w_price": 1 / count,
    }
    if wanted:
        parts |= {"r_option": met / len(wanted), "w_option": len(wanted) / count}
    return kind["r_type"] * total, parts


def goal_options(goal: Goal) -> list[str]:
    """Return a goal's options in the form in which they are compared: values, or names with values.

    A name with a value counts as a colour only if one of the two is exactly that colour.
    """
    if not isinstance(goal.goal_options, Mapping):
        return [normalize_color(value) for value in goal.goal_options]
    pairs = goal.goal_options.items()
    return [next((c for c in COLORS if c in pair), " ".join(pair)) for pair in pairs]


def type_score(bought: Product, goal: Goal, nouns: Nouns) -> dict[str, Any]:
    """Score whether it is the right kind of product: `r_type` 1, 0.5, 0.1 or 0, and why."""
    shared = {c.strip() for c in bought.product_category.split("›")}
    shared &= {c.strip() for c in goal.product_category.split("›")}
    category = len(shared) >= 2
    query = bought.query == goal.query
    wanted = list(nouns(goal.name))
    title = len(set(nouns(bought.title)) & set(wanted)) / len(wanted) if wanted else 0.2
    value = 1.0 if query or category or title > 0.2 else 0.5
    if title < 0.1:
        value = 0.1
    if title == 0.0:
        value = 0.0
    return {
        "r_type": value,
        "query_match": query,
        "category_match": category,
        "title_score": title,
    }


def attribute_met(wanted: str, bought: Product) -> bool:
    """Return whether an attribute is among the product's, or appears in its texts."""
    if any(close(wanted, have) for have in bought.attributes):
        return True
    texts = (bought.title, " ".join(bought.bullets), bought.description)
    return any(wanted in text.lower() for text in texts)


def normalize_color(text: str) -> str:
    """Return the first colour, in the list's order, that the text contains; else the text."""
    return next((color for color in COLORS if color in text), text)


@lru_cache(maxsize=100_000)
def close(one: str, other: str) -> bool:
    """Return whether two texts have nearly the same words, or one contains the other's."""
    ratio = extra("rapidfuzz.fuzz", "the WebShop environment").token_set_ratio(
        _plain(one), _plain(other)
    )
    return round(ratio) > MATCH


def _plain(text: str) -> str:
    """Drop accented Latin letters as the original's matcher does, and keep those of other
    scripts.
    """
    return re.sub(r"\W", " ", re.sub(r"[\x80-\xff]", "", text)).lower().strip()


def simple_nouns(text: str) -> list[str]:
    """Return words of a title that may be nouns: all but numbers and stop words, in lower case."""
    return [w for w in re.findall(r"[a-z]+", text.lower()) if len(w) > 2 and w not in STOP_WORDS]


def noun_tagger(nouns: str | Nouns = "auto") -> Nouns:
    """Return a tagger: a custom function; `simple`; the name of a spaCy model; or `auto`: the
    original's model if it is installed, else the simple one. Raises ValueError if a named model is
    missing.
    """
    if callable(nouns):
        return nouns
    if nouns == "simple":
        return simple_nouns
    try:
        tagger = extra("spacy", "spaCy").load("en_core_web_sm" if nouns == "auto" else nouns)
    except (ModuleNotFoundError, OSError) as error:
        if nouns == "auto":
            return simple_nouns
        raise ValueError(
            f"nouns is '{nouns}': expected auto, simple, or a model of spaCy that is installed "
            f"(pip install spacy; python -m spacy download en_core_web_sm) [{error}]"
        ) from error
    kinds = ("PNOUN", "NOUN", "PROPN")
    return lru_cache(maxsize=50_000)(
        lambda text: [token.text.lower() for token in tagger(text) if token.pos_ in kinds]
    )
