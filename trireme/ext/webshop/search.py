"""Search: which products a query finds, ranked as Lucene ranks them (BM25, k1 0.9, b 0.4).

Words are those of Lucene's standard analysis: Unicode word breaks, lower case, no possessive 's,
33 stop words, Porter's stems. Document lengths are rounded to a byte as Lucene stores them. Equal
scores (to 1e-4) are ordered by ASIN.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from trireme.envs.env import extra
from trireme.ext.webshop.catalogue import Product

K1, B = 0.9, 0.4
MAX_HITS = 50
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be but by for if in into is it no not of on or such that the "
        "their then there these they this to was will with",
    )
)
_WORD = re.compile(r"\w+(?:(?:(?<=[^\W\d_])['’.:·](?=[^\W\d_])|(?<=\d)['’.,;](?=\d))\w+)*")
_TIE = 1e-4
"""Scores that are closer than this may be equal."""
_EXACT = 24
"""Lengths below this are stored as they are."""


def document(product: Product) -> str:
    """Return the text by which a product is found."""
    options = ", and ".join(f"{name}: {', '.join(v)}" for name, v in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return f"{product.title} {product.description} {first} {options}".lower()


class _Numbers(dict[str, int]):
    """Numbers each word's stem; -1 if it is not indexed. A word is stemmed once."""

    def __init__(self) -> None:
        self._stem = extra("Stemmer", "the WebShop environment").Stemmer("porter").stemWord
        self.stems: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        plain = re.sub(r"['’]s$", "", word)
        indexed = plain not in STOP_WORDS
        self[word] = self.stems.setdefault(self._stem(plain), len(self.stems)) if indexed else -1
        return self[word]


class Search:
    """An index of all products; shared by all sessions, and never changed.

    The products of a word and their weights are in two arrays, one word after the other. Products
    are numbered in the order of their ASINs: equal scores are then in the right order.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        ordered = sorted(products, key=lambda product: product.asin)
        self._asins = [product.asin for product in ordered]
        numbers, said, ends = _Numbers(), array("i"), array("q")
        for product in ordered:
            words = (numbers[word] for word in _WORD.findall(document(product)))
            said.extend([number for number in words if number >= 0])
            ends.append(len(said))
        self._stems, total = numbers.stems, max(len(ordered), 1)
        self._stems, total = numbers.stems, max(len(ordered), 1)
        lengths, length = np.diff(np.asarray(ends), prepend=0), len(said) / total or 1.0
        # in place, and released early: these are as long as all texts together
        pairs = np.asarray(said).astype(np.int64)
        del said
        pairs *= total
        pairs += np.repeat(np.arange(len(ordered), dtype=np.int32), lengths)
        pairs.sort()
        first = np.flatnonzero(np.diff(pairs, prepend=-1))
        counts = np.diff(first, append=len(pairs)).astype(np.int32)
        pairs = pairs[first]
        del first
        self._starts = np.searchsorted(pairs, np.arange(len(self._stems) + 1) * total)
        self._documents = np.mod(pairs, total, out=pairs).astype(np.int32)
        del pairs
        frequency = np.diff(self._starts)
        idf = np.log(1 + (len(ordered) - frequency + 0.5) / (frequency + 0.5))
        stored = np.array([stored_length(n) for n in range(int(max(lengths, default=0)) + 1)])
        norm = K1 * (1 - B + B * stored[lengths] / length)
        self._weights = np.repeat(idf, frequency)
        self._weights *= counts
        self._weights /= counts + norm[self._documents]
        self.hits = lru_cache(maxsize=10_000)(self._hits)

    def postings(self, word: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the products that have a stem, by number, and its contribution to their scores."""
        number = self._stems.get(word)
        held = slice(0) if number is None else slice(*self._starts[number : number + 2])
        return self._documents[held], self._weights[held]

    def _hits(self, query: str) -> tuple[str, ...]:
        """Return ASINs of the best products, at most 50. A repeated word counts twice."""
        lists = [self.postings(word) for word in stems(query)]
        scores = np.zeros(len(self._asins))
        for documents, weights in lists:
            scores[documents] += weights
        # the 50th best of the rarest word's products is a floor that spares sorting all others
        enough = [documents for documents, _ in lists if len(documents) >= MAX_HITS]
        floor = 0.0
        if enough:
            rarest = scores[min(enough, key=len)]
            floor = np.partition(rarest, -MAX_HITS)[-MAX_HITS] - 2 * _TIE
        matching = np.flatnonzero(scores >= max(floor, np.finfo(float).tiny))
        order = np.argsort(-np.round(scores[matching], 4), kind="stable")
        return tuple(self._asins[number] for number in matching[order[:MAX_HITS]])


def stems(text: str) -> list[str]:
    """Return the terms of a text, in order."""
    numbers = _Numbers()
    words = [numbers[word] for word in _WORD.findall(text.lower())]
    named = list(numbers.stems)
    return [named[number] for number in words if number >= 0]


def stored_length(length: int) -> int:
    """Return a document's length after Lucene's byte: exact below 40, then with four bits."""
    if length < _EXACT:
        return length
    rest = length - _EXACT
    bits = rest.bit_length()
    if bits < 4:
        return length
    return _EXACT + ((rest >> (bits - 4)) << (bits - 4))
