"""Where a path in the YAML lies."""

from __future__ import annotations

import pytest

from trireme.config.lookup import located


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
