"""Without: copies the tree, deletes extensions with what belongs to them, and runs what is left.

    python scripts/without.py webshop sql             # the quick tests of a copy without these two
    python scripts/without.py --all -- trireme run    # any command, without any extension

An extension that uses a deleted one is deleted too, and so is a test file that imports from one,
itself or by another test file. A test that only names one is marked `extension`. The exit code is
the command's.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from trireme.extensions import Extension, extensions

ROOT = Path(__file__).parents[1]
QUICK = [sys.executable, "-m", "pytest", "-q", "-m", "not large and not slow"]


def ours() -> dict[str, Extension]:
    """The extensions of this repository."""
    return {n: e for n, e in extensions().items() if e.package == f"trireme.ext.{n}"}


def with_users(names: Iterable[str]) -> list[str]:
    """Add the extensions that use one of these, sorted. Raises SystemExit for an unknown name."""
    there = ours()
    gone = set(names)
    if unknown := sorted(gone - {*there}):
        raise SystemExit(f"there is no extension '{unknown[0]}'. There are: {', '.join(there)}")
    while users := {n for n, e in there.items() if gone & {*e.uses}} - gone:
        gone |= users
    return sorted(gone)


def copy_without(names: Iterable[str], to: Path) -> None:
    """Copy what git knows of the tree, less these extensions and their files."""
    there = ours()
    gone = [f"trireme/ext/{name}" for name in names]
    gone += [file for name in names for file in there[name].files]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for file in listed.stdout.splitlines():
        if any(file == one or file.startswith(f"{one}/") for one in gone):
            continue
        if (ROOT / file).is_file():
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, to / file)


def imported_by(file: Path) -> set[str]:
    """The modules that a file of Python imports from, with the names that may be modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def drop_broken_tests(copy: Path) -> list[str]:
    """Delete the test files of a copy that import what is not in it, and return them, sorted."""
    imports = {file: imported_by(file) for file in (copy / "tests").rglob("*.py")}
    dropped: list[str] = []

    def is_gone(module: str) -> bool:
        parts = module.split(".")
        if parts[0] != "tests" and parts[:2] != ["trireme", "ext"]:
            return False
        place = copy.joinpath(*parts)
        in_a_module = any(
            copy.joinpath(*parts[:cut]).with_suffix(".py").is_file()
            or copy.joinpath(*parts[:cut], "__init__.py").is_file()
            for cut in range(max(len(parts) - 1, 1), len(parts) + 1)
        )
        return not in_a_module and not place.is_dir()

    while broken := [file for file, modules in imports.items() if any(map(is_gone, modules))]:
        for file in broken:
            del imports[file]
            file.unlink()
            dropped.append(file.relative_to(copy).as_posix())
    return sorted(dropped)


def main() -> int:
    """Return the exit code of the command in the copy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="delete every extension")
    arguments = sys.argv[1:]
    command = QUICK
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, command = arguments[:cut], arguments[cut + 1 :]
    given = parser.parse_args(arguments)
    names = with_users(ours() if given.all else given.names)
    if not names:
        raise SystemExit("name the extensions to delete, or --all")
    with tempfile.TemporaryDirectory(prefix="trireme_without_") as folder:
        copy_without(names, Path(folder))
        if dropped := drop_broken_tests(Path(folder)):
            print(f"dropped, since they import one: {', '.join(dropped)}")
        print(f"without {', '.join(names)}: {' '.join(command)}", flush=True)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        bin_folder = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PYTHONPATH": path, "PATH": bin_folder}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
