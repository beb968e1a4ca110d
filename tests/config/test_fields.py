"""Fields: an extension adds keys to the schema, which check validates and the extension reads."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages import install, manifests_read_anew
from trireme.config.section import Section, fate_of, of

KEYS = '''
from typing import Annotated, Literal

from annotated_types import Ge

from trireme.config.section import After, Mapped, Moved, NoEffect, Refused, Section


class ShopKeys(Section):
    """Keys of a shop."""

    shop_address: Annotated[str, After("launcher"), Mapped("there is no shop")] = "local"
    """Where it is."""
    shelves: Annotated[int, Ge(1)] = 1
    """How many it has."""
    size: Annotated[Literal["small", "large"], NoEffect()] = "small"
    """How large it is."""
    open: Annotated[bool, Refused("is not for machines")] = False
    """Whether it is open."""
    shops: Annotated[int | None, Moved(to=".node_num")] = None
    """How many there are."""
    goods: dict[str, int] = {}
    """What it has."""


class BadKeys(Section):
    """Keys that cannot join."""

    launcher: str = ""
    owner: str
'''
NAMES = ("shop_address", "shelves", "size", "open", "shops", "goods")
MANIFEST = "[field]\n" + "".join(
    f'"{place}.{name}" = "things:ShopKeys"\n' for place in ("cluster", "shop") for name in NAMES
)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder on the path with the extension `shop`."""
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "shop", MANIFEST, KEYS, first_line="")
    with manifests_read_anew():
        yield tmp_path
    for module in ("package_shop.things", "package_shop"):
        sys.modules.pop(module, None)


def of_a_process(folder: Path, code: str) -> str:
    """What code prints in a process in which the schema is made anew."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOAD = """
import sys
from trireme.config.load import read_config
from trireme.config.section import of
from trireme.config.stages import check_fates, stages_of
config, problems = read_config("run.yaml", sys.argv[1:])
print(*problems, sep="\\n")
findings = check_fates(stages_of(config)[0])
print(*findings.problems, *findings.notes, sep="\\n")
"""


@pytest.mark.usefixtures("shop")
def test_a_key_of_an_extension_is_validated_and_noted_as_the_kernels(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.yaml").write_text(
        "cluster: {shop_address: there, shelves: '2', size: LARGE, open: true, shops: 3, goods: }\n"
    )
    typed = (
        "from package_shop.things import ShopKeys\n"
        "keys = of(config.cluster, ShopKeys)\n"
        "print(keys.shop_address, keys.shelves, keys.size, keys.goods, config.cluster.node_num)\n"
        "print(sorted(keys.model_fields_set), keys == of(config.cluster, ShopKeys))\n"
        "print([*type(config.cluster).model_fields][:2], [*config.cluster.model_dump()][-1])\n"
    )
    assert of_a_process(tmp_path, LOAD + typed).splitlines() == [
        "",
        "cluster.open (True) is not for machines",
        "cluster.shop_address (there): there is no shop",
        "read, where those are not given: cluster.shops=3 as cluster.node_num",
        "without effect here: cluster.size=large",
        "there 2 large {} 3",
        "['open', 'shelves', 'shop_address', 'shops', 'size'] True",
        "['launcher', 'shop_address'] goods",
    ]


@pytest.mark.usefixtures("shop")
def test_wrong_values_and_misspelt_keys_of_an_extension_have_sentences(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "cluster: {shelves: 0, size: huge, goods: {a: b}, shop_adress: here}\nshelves: 1\n"
    )
    assert of_a_process(tmp_path, LOAD).splitlines()[:5] == [
        "cluster.shelves is 0: expected a number at least 1",
        "cluster.size is 'huge': expected one of small, large",
        "cluster.goods.a is 'b': expected a whole number",
        "cluster.shop_adress is not a known key; did you mean 'cluster.shop_address'?",
        "shelves is not a known key; did you mean 'cluster.shelves'?",
    ]


@pytest.mark.usefixtures("shop")
def test_a_section_takes_the_keys_that_a_manifest_lists_by_its_name() -> None:
    class Shop(Section, place="shop"):
        """A section of that place."""

        nodes: int = 1
        launcher: str = ""
        last: int = 0

    class Other(Section, place="market"):
        """A section of another place."""

    assert [*Shop.model_fields] == ["nodes", "launcher", "shop_address", "last", *NAMES[1:]]
    assert {*Shop.joined} == {*NAMES} and not Other.joined and not Other.model_fields
    assert (fate_of(Shop.model_fields["size"]), Shop().model_dump()["shelves"]) != (None, 0)
    declared = Shop.joined["goods"]
    one = Shop.model_validate({"goods": {"pen": 2}})
    assert of(one, declared).model_dump(exclude_unset=True) == {"goods": {"pen": 2}}


def test_a_key_that_cannot_join_is_left_out_with_a_warning(
    shop: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = "".join(
        f'"shop.{name}" = "{place}"\n'
        for name, place in {
            "launcher": "things:BadKeys",
            "owner": "things:BadKeys",
            "price": "things:BadKeys",
            "sale": "nothing:Keys",
        }.items()
    )
    (shop / "package_shop" / "ext.toml").write_text(MANIFEST + more)
    with manifests_read_anew(), caplog.at_level(logging.WARNING):

        class Shop(Section, place="shop"):
            """A section of that place."""

            launcher: str = ""

    assert [*Shop.model_fields] == ["launcher", *NAMES]
    lines = "\n".join(caplog.messages)
    assert "field 'shop.launcher' is left out: Trireme has that key itself" in lines
    assert "field 'shop.owner' is left out: BadKeys declares no owner with a default" in lines
    assert "field 'shop.price' is left out: BadKeys declares no price with a default" in lines
    assert "field 'shop.sale' is left out: field 'package_shop.nothing:Keys': there is" in lines
