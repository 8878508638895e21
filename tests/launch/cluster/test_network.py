"""Processes in a network of their own: they reach each other, and nobody else reaches them."""

import socket
import subprocess
import sys

import pytest

from pase_mtf.launch.cluster import network as networks
from pase_mtf.launch.cluster.network import own_network

_SERVE = ("import socket; s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); "
          "print(s.getsockname()[1], flush=True); s.accept()")
_CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=5)"


def test_only_those_inside_are_reached():
    with own_network() as network:
        if network is None:
            pytest.skip("this system gives no network namespaces")
        server = subprocess.Popen(network.inside([sys.executable, "-I", "-c", _SERVE]), stdout=subprocess.PIPE)
        try:
            port = int(server.stdout.readline())
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.1", port), timeout=5)
            subprocess.run(network.inside([sys.executable, "-I", "-c", _CONNECT, str(port)]), check=True)
            assert server.wait(10) == 0
        finally:
            server.kill()
            server.wait()
        holder = network._holder
    assert holder.poll() is not None


@pytest.mark.parametrize("ways", [(("--no-such-flag",),), ()])
def test_where_there_is_none(monkeypatch, ways):
    monkeypatch.setattr(networks, "_WAYS", ways)
    with own_network() as network:
        assert network is None


def test_where_nothing_makes_one(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with own_network() as network:
        assert network is None
