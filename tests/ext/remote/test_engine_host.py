"""Engine hosts: what is said of a process that ends at once."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG_S
from trireme.engines.make import EngineSpec
from trireme.ext.remote.engine_host import EngineHost, start_all


def test_an_engine_that_ends_before_it_is_told_its_settings_is_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(subprocess.Popen):
        """By the time that its parent goes on."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", Ended)
    host = EngineHost(
        EngineSpec("model", 8), name="engine 1", log_file=tmp_path / "log", python="/bin/false"
    )
    with pytest.raises(RuntimeError, match="engine 1 has ended with exit code 1"):
        asyncio.run(start_all([host]))


def engine_that(does: str, folder: Path) -> EngineHost:
    """An engine process that is a shell script."""
    program = folder / "engine"
    program.write_text(f"#!/bin/sh\nread settings; echo ready > begun; {does}\n")
    program.chmod(0o755)
    return EngineHost(
        EngineSpec("model", 8), name="engine 1", log_file=folder / "log", python=str(program)
    )


def test_an_engine_has_time_to_end_by_itself_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def stop(host: EngineHost, grace: float) -> None:
        host.start()
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        await host.stop(grace)
        (tmp_path / "begun").unlink()

    # it reads the end of its input, and lets go of what it holds
    polite = engine_that("cat; sleep 0.3; echo done > ended", tmp_path)
    asyncio.run(asyncio.wait_for(stop(polite, HANG_S), HANG_S))
    assert (tmp_path / "ended").read_text() == "done\n"
    deaf = engine_that("sleep 600; echo late > ended", tmp_path)
    asyncio.run(asyncio.wait_for(stop(deaf, 0.2), HANG_S))
    assert (tmp_path / "ended").read_text() == "done\n"


@pytest.mark.parametrize("triton", [False, True])
def test_the_process_of_an_engine_looks_at_all_that_it_has_imported_not_once(
    triton: bool, tiny_dir: Path, tmp_path: Path
) -> None:
    """At its end too, unless triton is loaded, which reports what the collection does not free."""
    loads = (
        "import asyncio, sys\n\nclose = asyncio.Runner.close\n\n\n"
        "def load_and_close(runner):\n"
        "    sys.modules['triton'] = type(sys)('triton')\n"
        "    close(runner)\n\n\n"
        "asyncio.Runner.close = load_and_close\n"
    )
    (tmp_path / "noting.py").write_text(
        f"{loads if triton else ''}import atexit, gc, sys\nfrom pathlib import Path\n\n\n"
        "def note():\n"
        "    full, frozen = gc.get_stats()[2]['collections'], gc.get_freeze_count()\n"
        "    loaded = 'triton' in sys.modules\n"
        f"    noted = Path({str(tmp_path / 'noted')!r})\n"
        "    noted.write_text(f'{full} {frozen > 100_000} {loaded}')\n\n\n"
        "atexit.register(note)\n"
    )
    host = EngineHost(
        EngineSpec(str(tiny_dir), 64),
        name="engine 1",
        log_file=tmp_path / "log",
        plugins=[str(tmp_path / "noting.py")],
    )

    async def serve() -> None:
        host.start()
        await host.ready(HANG_S)
        await host.stop(HANG_S)

    asyncio.run(serve())
    full, frozen, loaded = (tmp_path / "noted").read_text().split()
    assert full == "0" and frozen != loaded and (loaded == "True" or not triton)
