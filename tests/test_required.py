"""What was installed for a run may not be skipped in it: TRIREME_REQUIRE makes such a skip fail,
and TRIREME_ONLY runs what would be skipped without it.
"""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]
SKIPS = """
import pytest

def test_skips():
    pytest.skip("PostgreSQL is not installed here")
"""
MARKS = """
import pytest

@pytest.mark.skipif(False, reason="no vLLM is named")
def test_of_vllm():
    pass

@pytest.mark.skipif(False, reason="no Java")
def test_of_java():
    pass

def test_of_ours():
    pass
"""


@pytest.mark.parametrize(("required", "code"), [("", 0), ("vllm", 0), ("vllm,postgres", 1)])
@pytest.mark.parametrize("module", [False, True], ids=["test", "module"])
def test_a_skip_of_what_is_required_fails(
    required: str,
    code: int,
    module: bool,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (
        SKIPS if not module else SKIPS + '\npytest.importorskip("nonesuch", reason="no postgres")'
    )
    pytester.makepyfile(text)
    monkeypatch.setenv("TRIREME_REQUIRE", required)
    done = pytester.runpytest_inprocess("-rs", "-p", "tests.conftest")
    # of skips alone pytest says 0 for a test and 5 for a module: nothing was collected
    assert done.ret == (code * (2 if module else 1) or (5 if module else 0))
    assert ("may not be left out" in done.stdout.str()) == bool(code)


def test_only_the_tests_that_one_package_makes_possible_can_be_chosen(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(MARKS)
    monkeypatch.setenv("TRIREME_ONLY", "vllm")
    done = pytester.runpytest_inprocess("-v", "-p", "tests.conftest")
    done.assert_outcomes(passed=1, deselected=2)
    assert "test_of_vllm" in done.stdout.str()
