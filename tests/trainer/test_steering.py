"""Steering by its name: a kind whose module cannot be imported is named."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from trireme.config import Plan
from trireme.registry import STEERINGS
from trireme.trainer.steering import examine_steering


def test_a_kind_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_up_rudder.py").write_text("import no_such_package_of_rudders\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(STEERINGS._paths, "rudder", "made_up_rudder:Rudder")
    says = "^steering 'made_up_rudder:Rudder': module 'made_up_rudder' fails to load: Module"
    with pytest.raises(ValueError, match=says):
        examine_steering("rudder", cast(Plan, None))
