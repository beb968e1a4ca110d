"""A tool that searches a corpus: the document that shares most words with the query.

The corpus is a file of JSON lines with a `text` each, named by the environment variable
SEARCH_CORPUS. Words that stand in few documents count more (BM25's idf, without its lengths).
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections import defaultdict
from pathlib import Path

from trireme.config.variables import variable

ROOT = variable("CHECKPOINT_ROOT_DIR", "./checkpoints")
CORPUS = Path(os.environ.get("SEARCH_CORPUS", f"{ROOT}/search_assets/seed_0/corpus.jsonl"))


def words(text: str) -> set[str]:
    """The words of a text, in small letters."""
    return set(re.findall(r"[a-z]+", text.lower()))


@functools.cache
def index(path: Path) -> tuple[list[str], dict[str, list[int]]]:
    """The documents, and for each word those that have it."""
    texts = [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]
    found: dict[str, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        for word in words(text):
            found[word].append(place)
    return texts, found


def search(query: str) -> str:
    """Searches the corpus and shows the document that fits best.

    Args:
        query: Some words, for example red tower.
    """
    texts, found = index(CORPUS)
    scores: dict[int, float] = defaultdict(float)
    for word in words(query):
        for place in found.get(word, ()):
            scores[place] += math.log(1 + len(texts) / len(found[word]))
    if not scores:
        return "Nothing found."
    return texts[max(scores, key=lambda place: (scores[place], -place))]
