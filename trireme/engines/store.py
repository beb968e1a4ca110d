"""Store: the keys and values by which processes that form a group find each other, and the group.

It has no password: whoever reaches it may write. So it listens at its own address alone, where
torch's would at all of the machine's.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo, Store, TCPStore


def open_store(host: str, port: int, *, serve: bool, timeout: float) -> TCPStore:
    """A connection to the store at an address; `serve` opens it there, port 0: at any that is free.

    Raises RuntimeError where nobody serves in `timeout` seconds, OSError where we cannot.
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


def gloo_group(
    store: Store, rank: int, size: int, *, timeout: float, address: str
) -> ProcessGroupGloo:
    """A group whose member listens at `address`, where that is one of this machine alone; else
    where torch does, at the address of this machine's name.
    """
    wait = timedelta(seconds=timeout)
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = wait
    try:
        alone = ip_address(socket.gethostbyname(address)).is_loopback
    except OSError:
        alone = False
    device = (
        ProcessGroupGloo.create_device(hostname=address)
        if alone
        else ProcessGroupGloo.create_default_device()
    )
    options._devices = [device]
    return ProcessGroupGloo(store, rank, size, options)
