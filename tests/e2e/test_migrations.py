"""Migrations: each page's own half of "the same run in both" runs as pasted, reduced."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

from tests.e2e.job import ROOT, rows, run, write_jsonl
from tests.test_documents import BLOCK
from tests.tiny import make_model

SMALL = (
    "algorithm.repeat_times=2",
    "buffer.batch_size=2",
    "buffer.total_steps=1",
    "model.max_prompt_tokens=400",
    "model.max_response_tokens=8",
    "model.max_model_len=410",
    "explorer.rollout_model.engine_type=torch",
    "explorer.rollout_model.engine_num=1",
)
FILE = re.compile(r"`(\w+\.py)`.*?\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def gsm8k(folder: Path) -> Path:
    """Rows of GSM8K's shape."""
    return write_jsonl(folder / "gsm8k.jsonl", rows(4))


def gsm8k_of_verl(folder: Path) -> Path:
    """The same as verl's Parquet files have them."""
    made: list[dict[str, Any]] = []
    for number, row in enumerate(rows(4)):
        truth = {"style": "rule", "ground_truth": row["answer"].partition("#### ")[2]}
        prompt = [{"role": "user", "content": row["question"]}]
        made.append(
            {"prompt": prompt, "data_source": "sums", "reward_model": truth}
            | {"extra_info": {"index": number}}
        )
    Dataset.from_list(made).to_parquet(folder / "gsm8k.parquet")
    return folder / "gsm8k.parquet"


def gsm8k_of_swift(folder: Path) -> Path:
    """The same as conversations, the result beside them."""
    return write_jsonl(
        folder / "gsm8k.jsonl",
        [
            {
                "messages": [{"role": "user", "content": row["question"]}],
                "solution": row["answer"].partition("#### ")[2],
            }
            for row in rows(4)
        ],
    )


@pytest.mark.parametrize(
    ("page", "data"),
    [
        ("migrate/trl", gsm8k),
        ("migrate/verl", gsm8k_of_verl),
        ("migrate/prime_rl", gsm8k),
        ("migrate/trinity", gsm8k),
        ("migrate/ms_swift", gsm8k_of_swift),
    ],
)
def test_the_run_of_a_migration_page_runs_as_pasted(page: str, data: Any, tmp_path: Path) -> None:
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    [config] = [code for language, code in BLOCK.findall(text) if language == "yaml"]
    for name, code in FILE.findall(text):
        (tmp_path / name).write_text(code)
    config = yaml.safe_load(config)
    path = str(data(tmp_path))
    for taskset in [
        config["buffer"]["explorer_input"]["taskset"],
        *config["buffer"]["explorer_input"].get("eval_tasksets", []),
    ]:
        taskset.update(path=path, subset_name=None)
    config["model"]["model_path"] = str(make_model(tmp_path / "model", max_len=512))
    done = run(tmp_path, config, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
