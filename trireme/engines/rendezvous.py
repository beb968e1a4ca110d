"""Rendezvous: where processes of torch.distributed find each other.

The store has no password: whoever reaches it may write. So it listens at its own address alone,
where torch's would at all of the machine's.
"""

from __future__ import annotations

import socket
from datetime import timedelta

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
