"""Catalogue: the products and goals of the original's files (WebShop, arXiv:2207.01206).

The same seed gives the same prices of ranges, goals and texts, in every process; nothing touches
the global random state. (In the original the order of the goals is fixed and their texts are not:
they equal ours of seed s if `random.seed(s)` precedes its constructor.)
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SHUFFLE_SEED = 233
NO_LIMIT = 1_000_000
_WANTED = "instruction_attributes"


@dataclass(frozen=True, slots=True)
class Product:
    """One product as its pages show it."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    price_tag: str
    price: float
    """For the reward; a range's is drawn."""
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    query: str
    category: str
    product_category: str
    instruction: str = ""
    instruction_attributes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Goal:
    """A customer's wish: the product to buy and its attributes."""

    asin: str
    category: str
    query: str
    name: str
    product_category: str
    instruction_text: str
    attributes: tuple[str, ...]
    price_upper: float
    goal_options: Mapping[str, str] | tuple[str, ...]
    weight: float = field(default=1.0)


Seed = int | random.Random
"""A number, or the random source that drew the products' prices, to continue with for their
goals."""
Filter = Callable[[int, Goal], bool]
"""Whether a goal stays, by its number among all and itself."""


def load_products(
    items: Path, attributes: Path, seed: Seed = 0, *, num_products: int | None = None
) -> list[Product]:
    """Load the products of `items_shuffle*.json` with the attributes of `items_ins_v2*.json`.

    `num_products` is the number of rows, from the top. Raises ValueError naming the file, and the
    product and key if one is missing.
    """
    source = _source(seed)
    about = read_json(attributes, dict)
    rows = _rows(items, num_products)
    return [_product(row, about.get(row["asin"], {}), source) for row in rows]


def count_goals(
    items: Path,
    attributes: Path,
    instructions: Path,
    *,
    human: bool = True,
    num_products: int | None = None,
) -> int:
    """Count the goals of `human_goals` or `synthetic_goals` without making them, in a fifth of the
    time.
    """
    rows = _rows(items, num_products)
    if human:
        written = read_json(instructions, dict)
        return sum(len(list(_instructions(written, row["asin"]))) for row in rows)
    about = read_json(attributes, dict)
    return sum(
        math.prod(map(len, _options_of(row).values()))
        for row in rows
        if all(about.get(row["asin"], {}).get(key) for key in ("instruction", _WANTED))
    )


def human_goals(products: Sequence[Product], instructions: Path, seed: Seed = 0) -> list[Goal]:
    """Load the goals that people wrote (`items_human_ins.json`)."""
    source = _source(seed)
    written = read_json(instructions, dict)
    goals = []
    for product in products:
        for row in _instructions(written, product.asin):
            said, limit = _price_limit(product.price, source)
            text = row["instruction"].strip(".") + said
            options = tuple(row.get("instruction_options") or ())
            goals.append(_goal(product, text, tuple(row[_WANTED]), limit, options))
    return goals


def synthetic_goals(products: Sequence[Product], seed: Seed = 0) -> list[Goal]:
    """Make a goal for every choice of options of each product that has an instruction.

    Each is weighted by the rarity of its attributes.
    """
    source = _source(seed)
    goals = []
    for product in products:
        if not product.instruction or not product.instruction_attributes:
            continue
        price, limit = _price_limit(product.price, source)
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            options = dict(zip(names, values, strict=True))
            said = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = f"{product.instruction}{f' with {said}' if said else ''}{price}"
            goals.append(_goal(product, text, product.instruction_attributes, limit, options))
    counts = Counter(attribute for goal in goals for attribute in goal.attributes)
    return [
        replace(goal, weight=sum(1 / counts[a] for a in goal.attributes) / len(goal.attributes))
        for goal in goals
    ]


def chosen_goals(
    goals: Sequence[Goal], filter_goals: Filter | None = None, limit_goals: int = -1
) -> list[Goal]:
    """Return the goals in the original's order: those that pass the filter, and a number of them
    drawn by weight.
    """
    source = random.Random(SHUFFLE_SEED)
    chosen = list(goals)
    source.shuffle(chosen)
    if filter_goals is not None:
        chosen = [goal for number, goal in enumerate(chosen) if filter_goals(number, goal)]
    if not 0 <= limit_goals < len(chosen):
        return chosen
    drawn: dict[int, None] = {}
    steps = weight_steps(chosen)
    while len(drawn) < limit_goals:
        drawn[draw(steps, source)] = None
    return [chosen[number] for number in drawn]


def weight_steps(goals: Sequence[Goal]) -> list[float]:
    """Return the cumulative weights, for `draw`."""
    return list(itertools.accumulate((goal.weight for goal in goals), initial=0.0))


def draw(steps: Sequence[float], source: random.Random) -> int:
    """Draw the number of a goal by weight. As in the original each has the weight of the one before
    it, so that the first of several is never drawn.
    """
    return min(bisect(steps, source.uniform(0, steps[-1])), len(steps) - 2)


def read_json(path: Path, kind: type) -> Any:
    """Return the content of a file. Raises ValueError naming it if it is missing or invalid."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(held, kind):
        raise ValueError(f"{path}: expected a {kind.__name__}, found {type(held).__name__}")
    return held


def _rows(items: Path, num_products: int | None) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of products, each product once. Raises ValueError as `load_products` does."""
    rows = read_json(items, list)[:num_products]
    seen: set[str] = set()
    for index, row in enumerate(rows):
        rows[index] = None  # a million of them are gigabytes
        if "asin" not in row or "name" not in row:
            raise ValueError(f"{items}: product {index} has no 'asin' or no 'name'")
        asin = row["asin"]
        if asin == "nan" or len(asin) > 10 or asin in seen:
            continue
        seen.add(asin)
        yield row
    if not seen:
        raise ValueError(f"{items}: there is no product in it")


def _instructions(written: Mapping[str, Any], asin: str) -> Iterator[Mapping[str, Any]]:
    """Yield a product's instructions that say what is wanted."""
    return (row for row in written.get(asin, ()) if row.get(_WANTED))


def _product(row: Mapping[str, Any], about: Mapping[str, Any], source: random.Random) -> Product:
    bullets = row.get("small_description") or []
    prices = _prices(row.get("pricing"))
    tag = f"${prices[0]}" if len(prices) == 1 else f"${prices[0]} to ${prices[1]}"
    price = prices[0] if len(prices) == 1 else source.uniform(prices[0], prices[1])
    return Product(
        asin=row["asin"],
        title=row["name"],
        description=row.get("full_description") or "",
        bullets=(bullets,) if isinstance(bullets, str) else tuple(bullets),
        price_tag=tag,
        price=price,
        options=_options_of(row),
        attributes=tuple(about.get("attributes", ["DUMMY_ATTR"])),
        query=str(row.get("query", "")).lower().strip(),
        category=row.get("category", ""),
        product_category=row.get("product_category", ""),
        instruction=about.get("instruction") or "",
        instruction_attributes=tuple(about.get(_WANTED) or ()),
    )


def _prices(pricing: str | None) -> list[float]:
    if not pricing:
        return [100.0]
    return [float(re.sub(r"[^\d.]", "", piece)) for piece in pricing.split("$")[1:]][:2]


def _options_of(row: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return dict(_options(row.get("customization_options") or {}))


def _options(groups: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, values in groups.items():
        if values is not None:
            texts = (v["value"].strip().replace("/", " | ").lower() for v in values)
            yield name.lower(), tuple(texts)


def _price_limit(price: float, source: random.Random) -> tuple[str, float]:
    """Return a price limit as text and as number; none if no two round numbers are above
    the price.
    """
    above = [p for p in range(10, 1000, 10) if p > price][:4]
    if len(above) < 2:
        return "", NO_LIMIT
    limit = max(source.sample(above, 2))
    return f", and price lower than {limit:.2f} dollars", float(limit)


def _goal(
    product: Product, text: str, attributes: tuple[str, ...], limit: float, options: Any
) -> Goal:
    return Goal(
        product.asin,
        product.category,
        product.query,
        product.title,
        product.product_category,
        text,
        attributes,
        limit,
        options,
    )


def _source(seed: Seed) -> random.Random:
    return seed if isinstance(seed, random.Random) else random.Random(seed)
