"""Processes in a network of their own reach each other, and nobody else reaches them; and hosts whose link is cut."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from cluster_runs import Run, metrics, no_network

from benchmarks import namespaces
from pase_mtf.launch.__main__ import main
from pase_mtf.launch.cluster import network as networks
from pase_mtf.launch.cluster.network import own_network

_SERVE = ("import socket; s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); "
          "print(s.getsockname()[1], flush=True); s.accept()")
_CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=5)"


def test_only_those_inside_are_reached():
    with own_network() as network:
        if network is None:
            assert no_network(), "the system gives one, and none was made"
            pytest.skip("this system gives no network namespaces")
        server = subprocess.Popen(network.inside([sys.executable, "-I", "-c", _SERVE]), stdout=subprocess.PIPE)
        try:
            port = int(server.stdout.readline())
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.1", port), timeout=5)
            subprocess.run(network.inside([sys.executable, "-I", "-c", _CONNECT, str(port)]), check=True)
            assert server.wait(600) == 0
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


@pytest.mark.slow
@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_two_hosts_whose_link_is_cut(preset, tmp_path):
    """As an operator of Kubernetes starts them, with TF_CONFIG; nothing tells either that the other is out of reach.
    The link comes back in time for a restart, which costs no step, and is cut again when none is left."""
    alone = tmp_path / "alone"
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=39",
                 "--warmup=1", "--compare=none", "--strategy=data_parallel", f"--output_dir={alone}"]) == 0
    with namespaces.hosts(2) as hosts:
        tasks = [f"{address}:2222" for address in hosts.addresses]
        runs = [Run(preset, tmp_path / f"rank{rank}", "--steps=100000", "--cluster=tf_config", "--clients=ranks",
                    "--strategy=data_parallel", "--checkpoint_every=5", "--max_restarts=1", prefix=hosts.on(rank, []),
                    environment={"TF_CONFIG": json.dumps(
                        {"cluster": {"worker": tasks}, "task": {"type": "worker", "index": rank}})})
                for rank in range(2)]
        silent = f"rank 1 ({tasks[1]}) said nothing for 10 s; "
        runs[0].reach(15)
        start = time.monotonic()
        hosts.cut(1)
        line = runs[0].process.stderr.readline()
        while line and "starting again" not in line:
            line = runs[0].process.stderr.readline()
        assert time.monotonic() - start < 60  # 10 on an idle machine
        assert f"{silent}starting again from the checkpoint" in line
        hosts.mend(1)
        done = max(metrics(runs[0].folder, "data_parallel"))
        runs[0].reach(max(40, done + 5))
        start = time.monotonic()
        hosts.cut(1)
        (code, _, err), (other_code, _, other_err) = runs[0].end(), runs[1].end()
        assert time.monotonic() - start < 90  # 15, and what the end of both takes, on an idle machine
    assert (code, other_code) == (7, 7)
    assert f"error: {silent}all processes were ended, after 1 restart" in err.splitlines()[-1]
    assert "[rank 1] error: rank 0" in other_err
    losses = metrics(runs[0].folder, "data_parallel")
    assert {step: losses[step] for step in range(40)} == pytest.approx(metrics(alone, "data_parallel"), rel=1e-4)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_who_is_no_administrator_may_bring_its_interface_up():
    found = subprocess.run(["unshare", *networks._WAYS[1], "grep", "CapEff", "/proc/self/status"], user=65534,
                           group=65534, extra_groups=[], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("this system gives others no namespaces")
    assert int(found.stdout.split()[1], 16) >> 12 & 1  # CAP_NET_ADMIN
