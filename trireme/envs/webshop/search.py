"""Search: which products a query finds, ranked as Lucene ranks them (BM25, k1 0.9, b 0.4).

Words are those of Lucene's standard analysis: Unicode word breaks, lower case, no possessive 's,
33 stop words, Porter's stems. Document lengths are rounded to a byte as Lucene stores them. Equal
scores (to 1e-4) are ordered by ASIN.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from trireme.envs.extras import extra
from trireme.envs.webshop.catalogue import Product

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
_EXACT = 24
"""Lengths below this are stored as they are."""


def document(product: Product) -> str:
    """The text that a product is found by."""
    options = ", and ".join(f"{name}: {', '.join(v)}" for name, v in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return f"{product.title} {product.description} {first} {options}".lower()


class Search:
    """An index of all products; shared by all sessions, and never changed."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._asins = np.array([product.asin for product in products])
        self._stemmer = extra("Stemmer", "the WebShop environment").Stemmer("porter")
        postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths = []
        for number, product in enumerate(products):
            words = self.words(document(product))
            lengths.append(len(words))
            for word, count in Counter(words).items():
                postings[word].append((number, count))
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        stored = np.array([stored_length(n) for n in lengths], dtype=np.float64)
        norm = K1 * (1 - B + B * stored / mean)
        self._weights: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, found in postings.items():
            numbers = np.array([n for n, _ in found])
            counts = np.array([c for _, c in found], dtype=np.float64)
            idf = math.log(1 + (len(products) - len(found) + 0.5) / (len(found) + 0.5))
            self._weights[word] = numbers, idf * counts / (counts + norm[numbers])
        self.hits = lru_cache(maxsize=10_000)(self._hits)

    def words(self, text: str) -> list[str]:
        """The terms of a text."""
        found = (re.sub(r"['’]s$", "", word) for word in _WORD.findall(text.lower()))
        return self._stemmer.stemWords([word for word in found if word not in STOP_WORDS])

    def _hits(self, query: str) -> tuple[str, ...]:
        """ASINs of the best products, at most 50. A word that is said twice counts twice."""
        scores = np.zeros(len(self._asins))
        for word in self.words(query):
            if word in self._weights:
                numbers, weights = self._weights[word]
                scores[numbers] += weights
        found = np.flatnonzero(scores)
        order = np.lexsort((self._asins[found], -np.round(scores[found], 4)))
        return tuple(self._asins[found[order[:MAX_HITS]]].tolist())


def stored_length(length: int) -> int:
    """A document's length after Lucene's byte: exact below 40, then with four bits."""
    if length < _EXACT:
        return length
    rest = length - _EXACT
    bits = rest.bit_length()
    if bits < 4:
        return length
    return _EXACT + ((rest >> (bits - 4)) << (bits - 4))
