"""Packages: leaves what pip leaves of a package that extends Trireme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trireme import extensions
from trireme.extensions import names_of

_CACHED: tuple[Callable[[], None], ...] = (
    extensions.extensions.cache_clear,
    names_of.cache_clear,
)


@contextmanager
def manifests_read_anew() -> Iterator[None]:
    """Forget the manifests that were read, before the block and after it."""
    for clear in _CACHED:
        clear()
    yield
    for clear in _CACHED:
        clear()


def install(
    folder: Path,
    name: str,
    manifest: str,
    code: str = "",
    *,
    package: str = "",
    first_line: str = "raise AssertionError('imported')",
) -> Path:
    """Write a package with one entry point into a folder of the path; returns its `things.py`.

    `first_line` stands in its `__init__.py`: by default, importing the package fails.
    """
    package = package or f"package_{name}"
    place = folder / package
    place.mkdir(exist_ok=True, parents=True)
    (place / "__init__.py").write_text(f"{first_line}\n")
    (place / "ext.toml").write_text(manifest)
    (place / "things.py").write_text(code)
    info = folder / f"{package}_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trireme.ext]\n{name} = {package}\n")
    return place / "things.py"
