"""A data set by its name: what is known of it without making it."""

from __future__ import annotations

import pytest

from trireme.config.dataset import dataset_facts
from trireme.config.generated import generated


def test_options_are_read_as_yaml_reads_them() -> None:
    name, options = generated("reasoning_gym:sums?size=20&deep=true&of=[1, '+']") or ("", {})
    assert name == "sums"
    assert options == {"size": 20, "seed": 0, "deep": True, "of": [1, "+"]}
    assert generated("data/sums.jsonl") is None


def test_size_and_columns_are_known_before_anything_is_made() -> None:
    facts = dataset_facts("reasoning_gym:sums?size=20", None, "train")
    assert facts is not None
    assert facts.rows == 20 and "question" in (facts.columns or ())
    with pytest.raises(ValueError, match="no split 'test': give another seed"):
        dataset_facts("reasoning_gym:sums", None, "test")
