"""Where processes of ours meet: every socket is bound to one address, the one by which the node is known to the cluster."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from rtpo_ray.errors import RtpoError

if TYPE_CHECKING:
    import torch.distributed as dist


def open_store(host: str, seconds: float) -> dist.TCPStore:
    """Serve a store of torch.distributed on a free port of `host`, an address of this machine; `.port` says which. Keep the result alive.

    Raises RtpoError.
    """
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as listening:  # torch by itself would listen on every interface
            listening.bind((host, 0))
            listening.listen(1024)
            store = dist.TCPStore(host, listening.getsockname()[1], None, is_master=True, timeout=timedelta(seconds=seconds),
                                  wait_for_workers=False, master_listen_fd=listening.fileno())
            listening.detach()  # the store closes it
            return store
    except (OSError, RuntimeError) as error:
        raise RtpoError(f"no store can be served at {host}: {error}; expected an address of this machine") from error


def join_store(host: str, port: int, seconds: float) -> dist.TCPStore:
    """A client of the store at `host`:`port`. Raises RuntimeError when it does not answer for `seconds`."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)


def use_interface_of(host: str) -> None:
    """Have gloo and NCCL use the interface with the address `host` in this process, unless the environment names one.

    Left alone, gloo takes whatever the machine's name resolves to, often the loopback, where nobody from another node comes.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # NCCL takes a bare name for a prefix
