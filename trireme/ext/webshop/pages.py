"""Pages: renders a session's page as nodes of text and buttons, and in the four observation
forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from trireme.ext.webshop.catalogue import Goal, Product

PAGE_SIZE = 10
SITE = "http://127.0.0.1:3000"
SUB_PAGES = ("description", "features", "reviews", "attributes")


@dataclass
class ShopSession:
    """A customer's current page and choices."""

    key: str
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
    reward_info: dict[str, Any] = field(default_factory=dict)
    """The parts of the reward."""

    @property
    def shown(self) -> Sequence[str]:
        """ASINs of the present page of results; none past the end."""
        return self.hits[(self.page - 1) * PAGE_SIZE : self.page * PAGE_SIZE]

    @property
    def address(self) -> str:
        """The address that the page would have in a browser."""
        if self.view == "index":
            return f"{SITE}/{self.key}"
        said = "+".join(self.keywords)
        if self.product is None:
            return f"{SITE}/search_results/{self.key}/{said}/{self.page}"
        item = f"{self.key}/{self.product.asin}"
        if self.view == "item":
            return f"{SITE}/item_page/{item}/{said}/{self.page}/{json.dumps(self.options)}"
        if self.view == "done":
            return f"{SITE}/done/{item}/{self.options}"
        view = self.view.capitalize()
        return f"{SITE}/item_sub_page/{item}/{said}/{self.page}/{view}/{self.options}"


Kind = Literal["text", "heading", "instruction", "button", "link", "option", "value"]


@dataclass(frozen=True)
class Node:
    """A text of a page: plain, or something to click."""

    text: str
    kind: Kind = "text"
    clicked: bool = False
    name: str = ""
    """For the button of an option, the key of that option; for a value, what it describes."""

    @property
    def seen(self) -> bool:
        """True if it shows anything: a parser of pages drops empty texts and empty lines."""
        return bool(self.text.strip() or (self.text and "\n" not in self.text))


def nodes(
    session: ShopSession, products: dict[str, Product], show_attributes: bool
) -> Iterator[Node]:
    """Yield the nodes of the present page, in the order of the document."""
    if session.view == "index":
        yield Node("WebShop")
        yield Node("Instruction: ", "heading")
        yield Node(session.goal.instruction_text, "instruction")
        yield Node("Search", "button")
        return
    if session.view == "done":
        yield from _done(session)
        return
    yield Node("Instruction:", "heading")
    yield Node(session.goal.instruction_text, "instruction")
    yield Node("Back to Search", "button")
    if session.view == "results":
        yield Node(f"Page {session.page} (Total results: {len(session.hits)})")
        if session.page > 1:
            yield Node("< Prev", "button")
        yield Node("Next >", "button")
        for asin in session.shown:
            yield Node(asin, "link", clicked=asin in session.visited)
            yield Node(products[asin].title)
            yield Node(products[asin].price_tag)
        return
    yield Node("< Prev", "button")
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


def rich_text(nodes: Sequence[Node]) -> str:
    """Render `text_rich`: buttons are marked, and clicked ones are listed first."""
    lines = ""
    for node in nodes:
        text = node.text
        if node.kind in _BEFORE:
            mark = "clicked button" if node.clicked else "button"
            text = f"{_BEFORE[node.kind]}[{mark}] {text} [{mark}_]"
            if node.kind == "option" and node.clicked:
                lines = f"You have clicked {node.text}.\n{lines}"
        if node.seen:
            lines += f"{text}\n"
    return lines


_BEFORE = {"button": "", "link": "\n", "option": "  "}
_MARKUP: dict[Kind, str] = {
    "text": "<p>{text}</p>\n",
    "heading": '<div id="instruction-text"><h4>{text}<br>',
    "instruction": "{text}</h4></div>\n",
    "button": '<button type="submit" class="btn">{text}</button>\n',
    "link": '<a class="product-link">{text}</a>\n',
    "option": '<input type="radio" name="{name}" value="{text}"><label>{text}</label>\n',
    "value": '<pre id="{name}">{text}</pre>\n',
}


def plain_text(nodes: Sequence[Node]) -> str:
    """Render `text`: only the words."""
    return " [SEP] ".join(node.text.strip() for node in nodes if node.seen)


def html(nodes: Sequence[Node]) -> str:
    """Render `html`: our own markup, with the original's ids and classes of interactive
    elements.
    """
    lines = [_MARKUP[n.kind].format(text=escape(n.text), name=escape(n.name)) for n in nodes]
    if any(node.text == "Search" and node.kind == "button" for node in nodes):
        lines.insert(-1, '<input id="search_input" type="text" name="search_query">\n')
    head = "<!DOCTYPE html>\n<html>\n<head><title>WebShop</title></head>\n<body>\n"
    return f"{head}{''.join(lines)}</body>\n</html>\n"


def clickables(session: ShopSession, nodes: Sequence[Node]) -> list[str]:
    """Return the texts that can be clicked, in lower case, buttons and products before options,
    each once.
    """
    if session.view == "done":
        return []
    buttons = [node.text.lower() for node in nodes if node.kind in ("button", "link")]
    options = [node.text for node in nodes if node.kind == "option"]
    return list(dict.fromkeys([*buttons, *options]))


def _item(session: ShopSession, product: Product, show_attributes: bool) -> Iterator[Node]:
    # as in the original an option is shown as chosen if the address has it in quotes: values with
    # quotes or other scripts never are, though they count
    address = session.address
    for name, values in product.options.items():
        yield Node(name)
        for value in values:
            yield Node(value, "option", f'"{value}"' in address, name)
    yield Node(product.title)
    yield Node(f"Price: {product.price_tag}")
    yield Node("Rating: N.A.")
    yield Node("Description", "button")
    yield Node("Features", "button")
    yield Node("Reviews", "button")
    if show_attributes:
        yield Node("Attributes", "button")
    yield Node("Buy Now", "button")


def _done(session: ShopSession) -> Iterator[Node]:
    assert session.product is not None
    options = json.dumps(session.options, sort_keys=True)
    for sign in "<>&'":
        options = options.replace(sign, f"\\u{ord(sign):04x}")
    said = ("Thank you for shopping with us!", "Your code: ", "None")
    yield from map(Node, (*said, " (Paste it in your MTurk interface.)", "Purchased", "asin"))
    yield Node(session.product.asin, "value", name="asin")
    yield Node("options")
    yield Node(options, "value", name="options")
    for name in ("attrs", "category", "query", "product category"):
        yield from (Node(name), Node("None"))
    # the original's text environment leaves its table of the goal empty, and misspells one name
    target = ("asin", "options", "attrs", "price upper", "instuction text", "category")
    yield from map(Node, ("Target", *target, "product category", "query", "Goal ", "None"))
    yield from map(Node, ("Reward", "Your score (min 0.0, max 1.0)"))
    yield Node(str(session.reward), "value", name="reward")
    yield from map(Node, ("Reward Details ", "None"))
