"""The store by which processes find each other listens where it was told to, and nowhere else."""

from __future__ import annotations

import socket

import pytest

from tests.limits import HANG_S
from trireme.engines.rendezvous import open_store
from trireme.trainer.ranks import RankSpec, connect, free_address


def refuses(host: str, port: int) -> bool:
    with socket.socket() as other:
        other.settimeout(HANG_S)
        return other.connect_ex((host, port)) != 0


def test_what_one_writes_the_other_reads() -> None:
    server = open_store("127.0.0.1", 0, serve=True, timeout=HANG_S)
    client = open_store("127.0.0.1", server.port, serve=False, timeout=HANG_S)
    client.set("a", "1")
    assert server.get("a") == b"1"


def test_a_store_on_one_address_is_not_open_on_others() -> None:
    """All of 127/8 is this machine: 127.0.0.2 stands for its address in a network."""
    address = free_address()
    ranks = connect(RankSpec(0, 2, address, timeout=HANG_S), serve=True)
    assert not refuses("127.0.0.1", ranks.port)
    assert refuses("127.0.0.2", ranks.port)


def test_an_address_that_is_taken_is_an_error_at_once() -> None:
    server = open_store("127.0.0.1", 0, serve=True, timeout=HANG_S)
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", server.port, serve=True, timeout=HANG_S)
