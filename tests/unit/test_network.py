"""What processes meet over listens on one address only."""

import os
import socket

import psutil
import pytest

from rtpo_ray.errors import RtpoError
from rtpo_ray.network import join_store, open_store, use_interface_of


def listening(port):
    """Addresses at which this process listens on `port`."""
    return {found.laddr.ip for found in psutil.Process().net_connections("tcp") if found.status == "LISTEN" and found.laddr.port == port}


def test_the_store_listens_on_its_address_only_and_serves():
    store = open_store("127.0.0.1", 5.0)
    other = join_store("127.0.0.1", store.port, 5.0)
    other.set("key", "value")
    assert store.get("key") == b"value" and listening(store.port) == {"127.0.0.1"}
    files = psutil.Process().num_fds()
    for _ in range(5):
        open_store("127.0.0.1", 5.0)
    assert psutil.Process().num_fds() <= files + 2  # what is not kept is closed


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(RtpoError, match=r"no store can be served at 203\.0\.113\.7: .*expected an address of this machine"):
        open_store("203.0.113.7", 5.0)


def test_collectives_use_the_interface_of_the_nodes_address_unless_the_user_says_otherwise(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    use_interface_of("203.0.113.7")  # nobody's
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    use_interface_of("127.0.0.1")
    (loopback,) = [name for name, addresses in psutil.net_if_addrs().items() if any(one.address == "127.0.0.1" for one in addresses)]
    assert loopback in [name for _, name in socket.if_nameindex()]
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (loopback, f"={loopback}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
