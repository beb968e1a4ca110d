"""Pages: what a session shows, as nodes of text and buttons, and the two forms of text of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trireme.envs.webshop.catalogue import Goal, Product

PAGE_SIZE = 10
SUB_PAGES = ("description", "features", "reviews", "attributes")


@dataclass
class Session:
    """Where a customer is, and what he has chosen."""

    goal: Goal
    view: str = "index"
    """index, results, item, done, or one of SUB_PAGES."""
    keywords: list[str] = field(default_factory=list)
    hits: Sequence[str] = ()
    page: int = 1
    product: Product | None = None
    options: dict[str, str] = field(default_factory=dict)
    visited: set[str] = field(default_factory=set)
    reward: float = 0.0

    @property
    def shown(self) -> Sequence[str]:
        """ASINs of the present page of results; none past the end."""
        return self.hits[(self.page - 1) * PAGE_SIZE : self.page * PAGE_SIZE]

    def clicked(self, value: str) -> bool:
        """Whether the page shows an option as chosen. The original looks for it in the address, so
        that values with quotes or other scripts never show, though they count.
        """
        return f'"{value}"' in json.dumps(self.options)


@dataclass(frozen=True)
class Node:
    """A text, or a button."""

    text: str
    button: bool = False
    clicked: bool = False
    before: str = ""


def nodes(session: Session, products: dict[str, Product], show_attributes: bool) -> Iterator[Node]:
    """The nodes of the present page, in the order of the document."""
    if session.view == "index":
        yield Node("WebShop")
        yield Node("Instruction: ")
        yield Node(session.goal.instruction_text)
        yield Node("Search", button=True)
        return
    if session.view == "done":
        yield from _done(session)
        return
    yield Node("Instruction:")
    yield Node(session.goal.instruction_text)
    yield Node("Back to Search", button=True)
    if session.view == "results":
        yield Node(f"Page {session.page} (Total results: {len(session.hits)})")
        if session.page > 1:
            yield Node("< Prev", button=True)
        yield Node("Next >", button=True)
        for asin in session.shown:
            yield Node(asin, button=True, clicked=asin in session.visited, before="\n")
            yield Node(products[asin].title)
            yield Node(products[asin].price_tag)
        return
    yield Node("< Prev", button=True)
    product = session.product
    assert product is not None
    if session.view == "item":
        yield from _item(session, product, show_attributes)
    elif session.view == "description" and product.description:
        yield Node(product.description)
    elif session.view == "features":
        yield from (Node(f" {bullet}") for bullet in product.bullets)
    elif session.view == "attributes":
        yield from (Node(f" {attribute}") for attribute in product.attributes)
        yield from map(Node, (product.category, product.query, product.product_category))


def rich_text(session: Session, found: Sequence[Node]) -> str:
    """`text_rich`: buttons are marked, and what was clicked is said first."""
    lines = ""
    for node in found:
        text = node.text
        if node.button:
            mark = "clicked button" if node.clicked else "button"
            text = f"[{mark}] {text} [{mark}_]"
            if node.before == "  " and node.clicked:
                lines = f"You have clicked {node.text}.\n{lines}"
        lines += f"{node.before}{text}\n"
    return lines


def plain_text(found: Sequence[Node]) -> str:
    """`text`: nothing but the words."""
    return " [SEP] ".join(node.text.strip() for node in found)


def clickables(session: Session, found: Sequence[Node]) -> list[str]:
    """What can be clicked, in lower case, buttons before options, each once."""
    if session.view == "done":
        return []
    buttons = [n.text.lower() for n in found if n.button and n.before != "  "]
    options = [n.text for n in found if n.button and n.before == "  "]
    return list(dict.fromkeys([*buttons, *options]))


def _item(session: Session, product: Product, show_attributes: bool) -> Iterator[Node]:
    for name, values in product.options.items():
        yield Node(name)
        for value in values:
            yield Node(value, button=True, clicked=session.clicked(value), before="  ")
    yield Node(product.title)
    yield Node(f"Price: {product.price_tag}")
    yield Node("Rating: N.A.")
    yield Node("Description", button=True)
    yield Node("Features", button=True)
    yield Node("Reviews", button=True)
    if show_attributes:
        yield Node("Attributes", button=True)
    yield Node("Buy Now", button=True)


def _done(session: Session) -> Iterator[Node]:
    assert session.product is not None
    yield from map(
        Node,
        (
            *("Thank you for shopping with us!", "Your code: ", "None"),
            *(" (Paste it in your MTurk interface.)", "Purchased", "asin", session.product.asin),
            *("options", json.dumps(session.options, sort_keys=True), "attrs", "None"),
            *("Your score (min 0.0, max 1.0)", str(session.reward), "Reward Details ", "None"),
        ),
    )
