"""Rewards and ranking against values worked out by hand."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("Stemmer", reason="PyStemmer is not installed: make test-extras runs these")
pytest.importorskip("rapidfuzz", reason="rapidfuzz is not installed: make test-extras runs these")

from trireme.ext.webshop.catalogue import Goal, Product
from trireme.ext.webshop.reward import (
    close,
    goal_options,
    normalize_color,
    noun_tagger,
    reward,
    simple_nouns,
    type_score,
)
from trireme.ext.webshop.search import MAX_HITS, Search, document, stems, stored_length

LAMP = Product(
    "B1", "Alder Lamp", "It is washable.", ("Easy to clean.",), "$10.0", 10.0, {},
    ("long lasting",), "lamps", "home", "Home › Light › Lamps",
)  # fmt: skip
GOAL = Goal(
    "B1", "home", "lamps", "Alder Lamp", "Home › Light › Lamps", "", ("long lasting", "wireless"),
    20.0, ("red",),
)  # fmt: skip


def test_options_of_a_made_goal_are_compared_with_their_names() -> None:
    goal = replace(GOAL, goal_options={"color": "red", "finish": "dark green", "size": "small"})
    assert goal_options(goal) == ["red", "finish dark green", "size small"]
    assert close("green", "finish dark green")  # the words of one lie in the other


def test_the_tagger_is_one_s_own_the_simple_one_or_a_model_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert noun_tagger(words) is words and noun_tagger("simple") is simple_nouns
    assert simple_nouns("The 3 Red-Lamps for a Desk") == ["red", "lamps", "desk"]

    class Token:
        def __init__(self, text: str) -> None:
            self.text, self.pos_ = text, "NOUN" if text.istitle() else "ADJ"

    def load(name: str) -> Any:
        if name not in ("en_core_web_sm", "mine"):
            raise OSError(f"no model {name}")
        return lambda text: [Token(word) for word in text.split()]

    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=load))
    assert noun_tagger("auto")("red Lamp") == noun_tagger("mine")("red Lamp") == ["lamp"]
    with pytest.raises(ValueError, match=r"nouns is 'none': expected auto, simple, or a model"):
        noun_tagger("none")
    monkeypatch.setitem(sys.modules, "spacy", None)
    assert noun_tagger("auto") is simple_nouns
    with pytest.raises(ValueError, match="pip install spacy"):
        noun_tagger("mine")


def words(text: str) -> list[str]:
    return text.lower().split()


def test_the_total_counts_attributes_options_and_the_price() -> None:
    total, parts = reward(LAMP, GOAL, {"color": "bright red"}, words)
    assert total == pytest.approx((1 + 1 + 1) / 4) and parts["r_att"] == 0.5
    assert reward(LAMP, GOAL, {}, words)[0] == pytest.approx(2 / 4)
    assert reward(replace(LAMP, price=21.0), GOAL, {}, words)[0] == pytest.approx(1 / 4)


@pytest.mark.parametrize("wanted", ["alder", "easy to clean", "washable"])
def test_an_attribute_may_stand_in_the_texts(wanted: str) -> None:
    goal = replace(GOAL, attributes=(wanted,))
    assert reward(LAMP, goal, {"color": "red"}, words)[0] == 1.0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 1.0),
        ({"query": "x", "product_category": "Toys", "title": "Alder Lamp"}, 1.0),  # title 1
        ({"query": "x", "product_category": "Home › Light", "title": "Alder Rug"}, 1.0),
        ({"query": "x", "product_category": "Toys", "title": "a b c d e"}, 0.0),
        ({"title": "a b c d e"}, 0.0),  # no word shared: overrides query and category
    ],
)
def test_the_kind_of_product(change: dict[str, Any], expected: float) -> None:
    assert type_score(replace(LAMP, **change), GOAL, words)["r_type"] == expected


def test_few_shared_nouns() -> None:
    goal = replace(GOAL, name="one two three four five six seven eight nine ten eleven lamp")
    other = replace(LAMP, query="x", product_category="Toys")
    assert type_score(other, goal, words)["r_type"] == 0.1  # 1 of 12
    some = replace(goal, name="one two three four five lamp")
    assert type_score(other, some, words)["r_type"] == 0.5  # 1 of 6
    assert type_score(other, replace(goal, name=""), words)["title_score"] == 0.2
    assert type_score(other, replace(goal, name="lamp lamp"), words)["title_score"] == 0.5


def test_colours_are_the_first_of_the_list() -> None:
    assert normalize_color("light blue") == normalize_color("dark blue") == "blue"
    assert normalize_color("9 | 10") == "9 | 10"
    assert goal_options(replace(GOAL, goal_options={"color": "navy", "size": "s"})) == [
        "navy", "size s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("x-large", "large", True), ("9", "9 | 10", True), ("small", "large", False),
     ("Easy-to-clean", "easy to clean", True), ("café", "caf", True), ("中", "文", False),
     ("é", "é", False), ("", "", False)],
)  # fmt: skip
def test_words_that_are_nearly_the_same(one: str, other: str, expected: bool) -> None:
    assert close(one, other) == expected


def test_lengths_are_rounded_as_lucene_stores_them() -> None:
    assert [stored_length(n) for n in (0, 23, 31, 39, 40, 41, 42, 55, 56, 59, 63, 1000)] == [
        0, 23, 31, 39, 40, 40, 42, 54, 56, 56, 60, 984,
    ]  # fmt: skip


def test_scores_are_bm25_and_ties_go_by_asin() -> None:
    def product(asin: str, title: str) -> Product:
        return replace(LAMP, asin=asin, title=title, description="", bullets=())

    search = Search([product("B3", "red lamp"), product("B2", "red lamp"), product("B1", "lamps")])
    assert stems("The runner's LAMPS and 3.5 o'clock") == ["runner", "lamp", "3.5", "o'clock"]
    assert search.hits("lamp") == ("B1", "B2", "B3") and search.hits("red lamp")[:2] == ("B2", "B3")
    assert search.hits("moon") == () and search.hits("") == ()
    numbers, weights = search.postings("red")
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    assert weights[0] == pytest.approx(idf / (1 + 0.9 * (1 - 0.4 + 0.4 * 2 / (5 / 3))))
    assert numbers.tolist() == [1, 2]  # in the order of the ASINs
    assert Search([]).hits("lamp") == ()


def test_what_is_left_out_of_the_sorting_is_not_among_the_best() -> None:
    source = random.Random(3)
    words = [f"w{i}" for i in range(30)]
    products = [
        replace(
            LAMP, asin=f"B{i:03}", title=" ".join(source.choices(words, k=source.randint(1, 9)))
        )
        for i in range(400)
    ]
    search, texts = Search(products), {p.asin: stems(document(p)) for p in products}
    mean = sum(map(len, texts.values())) / len(texts)
    for _ in range(50):
        query = " ".join(source.choices(words, k=source.randint(1, 5)))
        scores = {asin: 0.0 for asin in texts}
        for word in query.split():
            having = sum(word in text for text in texts.values())
            idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            for asin, text in texts.items():
                count = text.count(word)
                scores[asin] += idf * count / (count + 0.9 * (0.6 + 0.4 * len(text) / mean))
        best = sorted((-round(score, 4), asin) for asin, score in scores.items() if score)
        assert search.hits(query) == tuple(asin for _, asin in best[:MAX_HITS])
