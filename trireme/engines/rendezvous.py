"""Rendezvous: where processes of torch.distributed find each other.

The store has no password: whoever reaches it may write. So it listens at its own address alone,
where torch's would at all of the machine's.

gloo binds to what the machine's name stands for: on some systems 127.0.1.1, where other machines
find nobody. So a member of a group binds to the address from which it reaches the meeting point.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from ipaddress import ip_address

from torch._C._distributed_c10d import TCPStore


def open_store(host: str, port: int, *, serve: bool, timeout: float) -> TCPStore:
    """Connect to the store at an address; `serve` opens it there, port 0: on any free port.

    Raises RuntimeError if no store answers in `timeout` seconds, OSError if it cannot be opened.
    """
    wait = timedelta(seconds=timeout)
    if not serve:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=wait,
        master_listen_fd=listener.detach(),
    )


_SIOCGIFADDR = 0x8915  # Linux's request for an interface's address
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""torch's variable for the interface of gloo, which a user sets instead."""


def address_towards(host: str) -> str | None:
    """Return the address of this machine from which it reaches `host`; None: not known. Nothing is
    sent.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return probe.getsockname()[0]
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address, on Linux; else None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asks, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def choose_interface(host: str) -> None:
    """Set the interface that leads to `host` for the groups of torch.distributed in this process; a
    loopback address needs none. Variables that are set are respected.
    """
    address = address_towards(host)
    if address is None or ip_address(address).is_loopback:
        return
    if (name := interface_of(address)) is not None:
        os.environ.setdefault(GLOO_INTERFACE, name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
