"""A PostgreSQL server of the system's packages, on loopback, for as long as the tests run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.limits import HANG_S

USER, PASSWORD = "postgres", "s3cret-of-the-test"


def binaries() -> Path | None:
    """Where the server's programs lie; None where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class Server:
    """A running server."""

    def __init__(self, port: int, control: Callable[[str], None]) -> None:
        self.port = port
        self._control = control
        self._count = 0

    @contextmanager
    def away(self) -> Iterator[None]:
        """Not there, as after a crash."""
        self._control("stop")
        try:
            yield
        finally:
            self._control("start")

    def database(self) -> str:
        """The URL of an empty place for tables; a schema is made faster than a database."""
        import psycopg
        from psycopg import sql

        self._count += 1
        name = f"test_{self._count}"
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        return f"{self._url}?options=-csearch_path%3D{name}"

    def end_connections(self) -> None:
        """Cut everyone off, as a restart of the server does."""
        import psycopg

        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

    @property
    def _url(self) -> str:
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/postgres"


@contextmanager
def serving(programs: Path) -> Iterator[Server]:
    """A server with a data folder of its own; it does not run as root."""
    folder = Path(tempfile.mkdtemp(prefix="trireme-postgres-"))
    as_user = []
    if os.geteuid() == 0:
        shutil.chown(folder, USER, USER)
        as_user = ["runuser", "-u", USER, "--"]

    def call(program: str, *words: str) -> None:
        done = subprocess.run(
            [*as_user, str(programs / program), *words],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            timeout=HANG_S, cwd=folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    data, password = str(folder / "data"), folder / "password"
    password.write_text(PASSWORD)
    password.chmod(0o644)
    call(
        "initdb",
        "--no-sync",
        "-D",
        data,
        "-U",
        USER,
        "-A",
        "scram-sha-256",
        "--pwfile",
        str(password),
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder}"

    def control(word: str) -> None:
        more = ["-m", "immediate"] if word == "stop" else ["-l", str(folder / "log"), "-o", options]
        call("pg_ctl", "-D", data, "-w", *more, word)

    control("start")
    try:
        yield Server(port, control)
    finally:
        control("stop")
        shutil.rmtree(folder)
