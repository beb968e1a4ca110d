"""A data set by its name: what is known of it without making it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.made import write_rows
from trireme.config.dataset import DatasetFacts, dataset_facts, generated
from trireme.config.lookup import located


def facts_of(path: str, subset: str | None, split: str) -> DatasetFacts:
    facts = dataset_facts(path, subset, split)
    assert facts is not None
    return facts


def hub_layout(folder: Path, header: str = "") -> Path:
    write_rows(folder / "main" / "train-00000-of-00002.jsonl", 3)
    write_rows(folder / "main" / "train-00001-of-00002.jsonl", 4)
    write_rows(folder / "main" / "test-00000-of-00001.jsonl", 2)
    write_rows(folder / "socratic" / "train-00000-of-00001.jsonl", 5)
    if header:
        (folder / "README.md").write_text(f"---\n{header}---\n# Data\n")
    return folder


HEADER = """configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: socratic/*
"""


@pytest.mark.parametrize("header", ["", HEADER])
def test_a_subset_and_a_split_are_found_with_and_without_a_header(tmp_path, header):
    folder = str(hub_layout(tmp_path / "gsm8k", header))
    assert facts_of(folder, "main", "train").rows == 7
    assert facts_of(folder, "main", "test").rows == 2
    assert facts_of(folder, "socratic", "train").rows == 5
    assert facts_of(folder, "main", "test").columns == ("question", "answer")


def test_an_unknown_subset_names_the_known(tmp_path):
    folder = str(hub_layout(tmp_path / "gsm8k", HEADER))
    with pytest.raises(ValueError, match="has no subset 'mian'; did you mean 'main'"):
        facts_of(folder, "mian", "train")
    with pytest.raises(ValueError, match="has several subsets"):
        facts_of(folder, None, "train")


def test_a_slice_is_counted(tmp_path):
    path = str(write_rows(tmp_path / "x.jsonl", 40))
    assert facts_of(path, None, "train[:10]").rows == 10
    assert facts_of(path, None, "train[50%:]").rows == 20


def test_parquet_csv_and_saved_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"q": ["a", "b"], "a": [1, 2]})
    data.to_parquet(str(tmp_path / "p" / "train.parquet"))
    data.to_csv(str(tmp_path / "c" / "train.csv"))
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "d"))
    for folder in "pcd":
        facts = facts_of(str(tmp_path / folder), None, "train")
        assert facts.columns == ("q", "a")
    assert facts_of(str(tmp_path / "p"), None, "train").rows == 2
    assert facts_of(str(tmp_path / "c"), None, "train").rows == 2


def test_the_folder_that_the_alfworld_script_writes(tmp_path):
    write_rows(tmp_path / "train.jsonl", 6, game_file="g", target="")
    (tmp_path / "dataset_dict.json").write_text('{"splits": [{"name": "train"}]}')
    assert facts_of(str(tmp_path), None, "train").rows == 6


def test_a_path_is_local_or_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert located("openai/gsm8k", "datasets") is None
    assert located(str(tmp_path), "models") == tmp_path
    (tmp_path / "models").mkdir()
    for missing in ("./x", "/x/y", "a/b/c", "rows.jsonl", "models/mine"):
        with pytest.raises(ValueError, match="is no file or folder here"):
            located(missing, "models")
    snapshot = tmp_path / "hub" / "models--gpt2" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert located("gpt2", "models") == snapshot


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
