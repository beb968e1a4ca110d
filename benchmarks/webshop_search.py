"""WebShop search: what does an exact index of a million products cost?

    OMP_NUM_THREADS=1 python benchmarks/webshop_search.py --products 1000000  # trireme-rl[envs]

The words of a product are drawn by Zipf's law, 70 each, as many as an average product page has in
its title, description, first feature and options. Queries have six words: drawn alike, and all of
them among the 60 most frequent words, which is the worst case. Exits 1 over the limits below.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator

import numpy as np

from trireme.ext.webshop.catalogue import Product
from trireme.ext.webshop.search import Search

WORDS, VOCABULARY, HEAD = 70, 400_000, 60
MOST_SECONDS, MOST_GIGABYTES, MOST_MILLISECONDS = 180.0, 4.0, 30.0


class Words:
    """Words that are as frequent as those of a natural language."""

    def __init__(self) -> None:
        self._words = np.array([f"w{number:x}q" for number in range(VOCABULARY)])
        frequency = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
        self._steps = frequency / frequency[-1]
        self._source = np.random.default_rng(0)

    def text(self, count: int, head: bool = False) -> str:
        """So many words."""
        if head:
            return " ".join(self._words[self._source.integers(0, HEAD, count)])
        return " ".join(self._words[np.searchsorted(self._steps, self._source.random(count))])


def products(count: int, words: Words) -> Iterator[Product]:
    """Products with nothing but a title."""
    for number in range(count):
        title = words.text(WORDS)
        yield Product(f"B{number:09d}", title, "", (), "$1.0", 1.0, {}, (), "", "", "")


def gigabytes() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> int:
    """One line a figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--products", type=int, default=100_000)
    words = Words()
    held = list(products(parser.parse_args().products, words))
    before, started = gigabytes(), time.perf_counter()
    search = Search(held)
    seconds, memory = time.perf_counter() - started, gigabytes() - before
    print(f"{len(held):,} products: index in {seconds:.1f} s, {memory:.2f} GB at most", flush=True)
    slowest = 0.0
    for kind in ("drawn", "frequent"):
        queries = [words.text(6, head=kind == "frequent") for _ in range(200)]
        times = []
        for query in queries:
            started = time.perf_counter()
            search.hits(query)
            times.append(1e3 * (time.perf_counter() - started))
        mean = sum(times) / len(times)
        slowest = max(slowest, mean)
        print(f"queries of {kind} words: {mean:.1f} ms, 95 % below {np.quantile(times, 0.95):.1f}")
    over = (seconds > MOST_SECONDS, memory > MOST_GIGABYTES, slowest > MOST_MILLISECONDS)
    print(f"limits: {MOST_SECONDS:.0f} s, {MOST_GIGABYTES:.0f} GB, {MOST_MILLISECONDS:.0f} ms")
    return int(any(over))


if __name__ == "__main__":
    sys.exit(main())
