"""The name of a data set that is made, and what of it is refused without its package."""

from __future__ import annotations

import pytest

from trireme.config.schema_rollout import TasksetConfig
from trireme.ext.environments.generated import generated
from trireme.launch.tasksets import rows_of


def test_options_are_read_as_yaml_reads_them() -> None:
    name, options = generated("reasoning_gym:sums?size=20&deep=true&of=[1, '+']") or ("", {})
    assert name == "sums"
    assert options == {"size": 20, "seed": 0, "deep": True, "of": [1, "+"]}
    assert generated("data/sums.jsonl") is None


def test_a_data_set_that_is_made_has_no_other_split() -> None:
    with pytest.raises(ValueError, match="has no split 'test': give another seed"):
        rows_of(TasksetConfig(path="reasoning_gym:sums", split="test"))
