"""The store by which processes find each other listens where it was told to, and nowhere else."""

from __future__ import annotations

import os
import socket

import pytest

from tests.limits import HANG_S
from trireme.engines import rendezvous
from trireme.engines.rendezvous import address_towards, interface_of, open_store
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
    ranks = connect(RankSpec(0, 2, address, timeout=HANG_S, lost_after=HANG_S), serve=True)
    assert not refuses("127.0.0.1", ranks.port)
    assert refuses("127.0.0.2", ranks.port)


def test_an_address_that_is_taken_is_an_error_at_once() -> None:
    server = open_store("127.0.0.1", 0, serve=True, timeout=HANG_S)
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", server.port, serve=True, timeout=HANG_S)


def test_a_member_listens_where_it_reaches_the_meeting_point() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") is None
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None


INTERFACES = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.7", "wg0": None}


@pytest.mark.parametrize(
    ("towards", "given", "gloo", "nccl"),
    [
        ("10.0.0.7", {}, "eth0", "=eth0"),
        ("10.0.0.7", {"GLOO_SOCKET_IFNAME": "docker0"}, "docker0", "=eth0"),
        ("10.0.0.7", {"NCCL_SOCKET_IFNAME": "ib0"}, "eth0", "ib0"),
        ("127.0.0.1", {}, None, None),  # all on one machine: torch's default
        ("10.0.0.9", {}, None, None),  # no interface has it
        (None, {}, None, None),
    ],
)
def test_ranks_of_several_machines_use_the_interface_that_leads_to_the_first(
    towards: str | None,
    given: dict[str, str],
    gloo: str | None,
    nccl: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the address of the machine's name, which may be 127.0.1.1."""

    def ioctl(_: object, request: int, packed: bytes) -> bytes:
        if (address := INTERFACES[packed.rstrip(b"\0").decode()]) is None:
            raise OSError("no address")
        return bytes(20) + socket.inet_aton(address) + bytes(232)

    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(INTERFACES)))
    monkeypatch.setattr(rendezvous.fcntl, "ioctl", ioctl)
    monkeypatch.setattr(rendezvous, "address_towards", lambda host: towards)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    rendezvous.choose_interface("10.0.0.1")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == gloo
    assert os.environ.get("NCCL_SOCKET_IFNAME") == nccl
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(name, None)
