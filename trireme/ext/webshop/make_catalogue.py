"""Make a catalogue: products and goals in the original's file format, where its data is not.

python -m trireme.ext.webshop.make_catalogue FOLDER --products 1000 --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trireme.files import write_text
from trireme.text import say

KINDS = {
    "lamp": ("Home & Kitchen › Lighting › Table Lamps", "table lamps", ("color", "style")),
    "sofa": ("Home & Kitchen › Furniture › Sofas", "sofas", ("color", "size")),
    "shirt": ("Clothing › Men › Shirts", "men's shirts", ("color", "size")),
    "shoes": ("Clothing › Women › Shoes", "women's shoes", ("color", "size")),
    "shampoo": ("Beauty › Hair Care › Shampoo", "shampoo", ("scent", "size")),
    "cookies": ("Grocery › Snacks › Cookies", "cookies", ("flavor", "size")),
    "headphones": ("Electronics › Audio › Headphones", "headphones", ("color", "style")),
    "rug": ("Home & Kitchen › Rugs › Area Rugs", "area rugs", ("color", "size")),
}
VALUES = {
    "color": ("black", "navy blue", "dark green", "light grey", "red", "ivory", "wine"),
    "size": ("small", "medium", "large", "x-large", "9 / 10", "5 x 7"),
    "style": ("modern", "classic", "with cover", "twin pack"),
    "scent": ("lavender", "mint", "citrus", "unscented"),
    "flavor": ("chocolate", "lemon", "vanilla", "oat"),
}
MAKERS = ("Alder", "Brimo", "Castel", "Dovar", "Elmira", "Fjord", "Gantry", "Holm")
QUALITIES = (
    "machine washable", "easy to clean", "long lasting", "gluten free", "noise cancelling",
    "water resistant", "hand made", "eco friendly", "non slip", "wireless",
)  # fmt: skip


def make_catalogue(folder: Path, products: int, seed: int) -> None:
    """Write the three files. Every product has a goal that people might have written."""
    source = random.Random(f"webshop {seed}")
    rows, about, people = [], {}, {}
    for number in range(products):
        asin = f"B{number:09d}"
        kind = source.choice(sorted(KINDS))
        qualities = source.sample(QUALITIES, 3)
        row = _product(asin, kind, qualities, source)
        rows.append(row)
        wanted = source.sample(qualities, 2)
        options = row["customization_options"]
        chosen = [source.choice(values)["value"].lower() for values in options.values()]
        text = f"i am looking for a {kind} that is {wanted[0]} and {wanted[1]}"
        about[asin] = {
            "attributes": qualities,
            "instruction": text,
            "instruction_attributes": wanted,
        }
        said = f"{text}, in {' and '.join(chosen)}."
        people[asin] = [
            {
                "instruction": said,
                "instruction_attributes": wanted,
                "instruction_options": [value.replace("/", " | ") for value in chosen],
            }
        ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, held in (
        (f"items_shuffle_{products}.json", rows),
        (f"items_ins_v2_{products}.json", about),
        ("items_human_ins.json", people),
    ):
        write_text(folder / name, json.dumps(held))


def _product(
    asin: str, kind: str, qualities: Sequence[str], source: random.Random
) -> dict[str, Any]:
    category, query, options = KINDS[kind]
    maker, low = source.choice(MAKERS), source.randint(5, 300)
    price = source.choice((f"${low}.99", f"${low}.49 - ${low + 20}.99", f"${low}.00"))
    return {
        "asin": asin,
        "name": f"{maker} {qualities[0].title()} {kind.title()} Model {source.randint(1, 99)}",
        "full_description": f"A {kind} by {maker}, {' and '.join(qualities)}, for every day.",
        "small_description": [f"{quality.capitalize()}." for quality in qualities],
        "pricing": price,
        "customization_options": {
            name: [{"value": value} for value in source.sample(VALUES[name], 3)] for name in options
        },
        "images": [""],
        "category": category.split(" › ")[0].lower(),
        "query": query,
        "product_category": category,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder that becomes $WEBSHOP_DATA")
    parser.add_argument("--products", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.products < 1:
        parser.error(f"--products: {options.products}: expected at least 1")
    make_catalogue(options.folder, options.products, options.seed)
    say(f"{options.products} products with a goal each in {options.folder}")


if __name__ == "__main__":
    main()
