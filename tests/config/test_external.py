"""A model of someone else's: what is said where the extension that asks it is not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.made import problems_of
from trireme import extensions
from trireme.extensions import names_of
from trireme.registry import EXTERNAL_MODELS


def test_without_its_extension_an_external_model_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extensions, "extensions", dict)
    monkeypatch.setattr(EXTERNAL_MODELS, "_registered", {})
    names_of.cache_clear()
    try:
        said = problems_of(tmp_path, "mode=bench", "model.external_model.enable=true")
    finally:
        names_of.cache_clear()
    assert (
        "model.external_model.enable is true, which needs the extension 'external_model', which is "
        "not here: `trireme extensions` lists what is"
    ) in said
