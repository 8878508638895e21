"""python -m benchmarks.cluster, and the namespaces that stand for its hosts."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from markdown_cells import rows

from benchmarks import cluster, distribute, namespaces
from benchmarks.cluster import Rows, link_of, steps_within
from benchmarks.cluster_page import Link, Row, document
from pase_mtf import models
from pase_mtf.interrupts import LAST_WISH, ONE_WISH
from pase_mtf.machine.machine import Machine
from pase_mtf.runtime import describe_host

_NEEDS_HOSTS = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())


def test_links_have_the_balance_of_the_gpus():
    for name in ("1080ti", "2080ti"):
        link, gpu = link_of(name, 4, 3e10), Machine.load(name)
        assert link.flops / link.rate == pytest.approx(gpu.rates["matmul"] / gpu.links[0].bandwidth)
        # Beyond a node it is the link between nodes.
        assert link_of(name, 16, 3e10).balance == pytest.approx(gpu.rates["matmul"] / gpu.links[1].bandwidth)


def test_slow_links_have_fewer_steps_measured():
    link = Link(balance=4000.0, flops=4e9, rate=1e6)
    # Of 1,000,000 parameters each of four devices sends three quarters of 4 MB, twice: 6 s.
    assert steps_within(link, 4, 1_000_000, 6, 30.0) == 5
    assert steps_within(link, 4, 1_000_000, 6, 60.0) == 6
    assert steps_within(link, 4, 28_000_000, 6, 30.0) == 3
    assert steps_within(link, 1, 28_000_000, 6, 30.0) == 6


def _arm(measured, predicted, same_as=None):
    return {"measured_ms": measured, "measured_ms_spread": 1.4, "predicted_ms": predicted, "same_as": same_as,
            "measured_steps": 6}


def _row(clients="one", model="alexnet", **measured):
    arms = {"search": _arm(100, 90), "data_parallel": _arm(400, 360), "expert": _arm(100, 90, "search"),
            "stock_data_parallel": _arm(500, None)}
    arms |= {name: _arm(value, value) for name, value in measured.items()}
    return Row(model, 4, "2080ti", clients, dataclasses.asdict(link_of("2080ti", 4, 3e10)), {
        "arms": arms, "left_out": {}, "disagreement": None,
        "facts": {"machine": "local: measured here; a link of 4 devices: 6 MB/s", "versions": "TensorFlow 9"}},
        [480.0, 440.0, 450.0], [1.5, 6.25], {"processor": describe_host(), "commit": "abc1234"})


def test_page(tmp_path):
    kept = Rows(str(tmp_path / "cluster"))
    kept.add(_row("ranks", search=80))
    kept.add(_row())
    text = document(list(Rows(str(tmp_path / "cluster"))))  # as it was written
    assert text == (tmp_path / "cluster.md").read_text(encoding="utf-8")
    found, _, of_ranks = (row for row in rows(text) if row[:2] == ["2080ti", "alexnet"])
    assert of_ranks[3:] == ["searched", "100 ± 1", "80 ± 1", "1.25×"]
    assert found[2:] == [
        "4", "500 ± 1", "450 ± 10", "400 ± 1", "100 ± 1 (same)", "-", "100 ± 1", "**4.00×**", "4.00×",
        "3.54×", "4.50×", "360", "90", "equal", _row().facts["processor"], "abc1234"]
    assert "a link of 4 devices: 6 MB/s" in text
    assert "1.5 to 6.2 meanwhile" in text
    assert "TCP by" not in text  # older rows do not say it
    told = dataclasses.replace(_row(), facts={**_row().facts, "tcp": "cubic"})
    assert "commit abc1234, TCP by cubic;" in document([told])
    assert "| 2080ti    |       4 | alexnet " in text  # whose links those are
    assert "IndexedSlices" not in text  # AlexNet looks up nothing
    words = [dataclasses.replace(_row(clients), model="transformer", plain=plain)
             for clients, plain in (("one", [300.0]), ("ranks", None))]
    assert "takes 1.33 times with one client (4 hosts, 2080ti), 1.33 times with a graph per rank" in document(words)
    elsewhere = dataclasses.replace(words[1], link={**words[1].link, "flops": 2e10})  # links that are held otherwise
    assert "with a graph per rank" not in document([words[0], elsewhere])
    assert "<svg" in (tmp_path / "cluster.svg").read_text(encoding="utf-8")


def test_it_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """Rows that are there are not measured again, and what a worker computes is taken from them."""
    monkeypatch.setattr(namespaces, "missing", lambda: "")
    done = []

    class Hosts:
        addresses = ("10.0.0.1",) * 4

        def limit(self, rate):
            done.append(round(rate))

    monkeypatch.setattr(namespaces, "hosts", lambda count: __import__("contextlib").nullcontext(Hosts()))
    monkeypatch.setattr(cluster, "_measure", lambda cluster, link, name, key, flags: (
        done.append(key[2:]) or _row(key[3], key[2])))
    Rows(str(tmp_path / "cluster")).add(_row())
    flags = ["--models=alexnet,rnnlm", "--clusters=2080ti", f"--output={tmp_path}"]
    assert cluster.main(flags) == 0
    rate = round(link_of("2080ti", 4, 3e10).rate)
    assert done == [rate, ("rnnlm", "one"), ("alexnet", "ranks")]
    assert len(json.loads((tmp_path / "cluster.json").read_text())) == 3
    told = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "x data parallel" in line]
    assert told == ["2080ti, rnnlm on 4 hosts, clients=one", "2080ti, alexnet on 4 hosts, clients=ranks"]
    done.clear()
    assert cluster.main(flags) == 0
    assert done == []


@pytest.mark.parametrize(("flag", "says"), [
    ("--models=alexnett", "did you mean 'alexnet'"), ("--clusters=90ti", "unknown machine"),
    ("--devices=four", "whole numbers")])
def test_what_is_misspelt_is_named_before_anything_is_made(tmp_path, capsys, monkeypatch, flag, says):
    monkeypatch.setattr(namespaces, "missing", lambda: "")
    monkeypatch.setattr(namespaces, "hosts", None)
    assert cluster.main([flag, f"--output={tmp_path}"]) == 2
    assert says in capsys.readouterr().err


def test_results_that_cannot_be_kept_are_told_before_anything_is_made(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(namespaces, "missing", lambda: "")
    monkeypatch.setattr(namespaces, "hosts", None)
    (tmp_path / "file").write_text("")
    assert cluster.main([f"--output={tmp_path / 'file'}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: --output={tmp_path / 'file'}: cannot write cluster.json there: ")


def test_what_goes_wrong_while_measuring_is_no_wrong_flag(tmp_path, monkeypatch):
    """Any ValueError was told as one of --devices."""
    def broken(*given):
        raise ValueError("not of a flag")

    monkeypatch.setattr(namespaces, "missing", lambda: "")
    monkeypatch.setattr(cluster, "_measure_all", broken)
    with pytest.raises(ValueError, match="not of a flag"):
        cluster.main(["--models=alexnet", f"--output={tmp_path}"])


def test_without_root_it_is_skipped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert cluster.main([f"--output={tmp_path}"]) == 0
    assert capsys.readouterr().err.startswith("skipped: needs ")


_SEND = "import socket, sys; socket.create_connection((sys.argv[1], 7777), timeout=10).sendall(bytes(900_000))"
_TAKE = ("import socket; s = socket.create_server(('', 7777)); print('up', flush=True); c, _ = s.accept()\n"
         "while c.recv(65536): pass")


@_NEEDS_HOSTS
def test_a_link_carries_no_more_than_it_is_held_to():
    with namespaces.hosts(2) as hosts:
        names = [hosts.on(host, [])[3] for host in range(2)]
        assert hosts.congestion_control in pathlib.Path(
            "/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="utf-8").split()
        hosts.limit(1e6)
        taker = subprocess.Popen(hosts.on(1, [sys.executable, "-c", _TAKE]), stdout=subprocess.PIPE)
        try:
            assert taker.stdout.readline() == b"up\n"
            start = time.monotonic()
            subprocess.run(hosts.on(0, [sys.executable, "-c", _SEND, hosts.addresses[1]]), check=True)
            assert taker.wait(30) == 0
            # What a link may send at once is let through, in both of its directions, and the rest is held.
            assert time.monotonic() - start > (900_000 - 2 * 2 ** 17) / 1e6
        finally:
            taker.kill()
            taker.wait()
            taker.stdout.close()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in names)


@_NEEDS_HOSTS
def test_hosts_of_a_process_that_was_killed_are_removed_by_the_next():
    code = ("import os\nfrom benchmarks import namespaces\n"
            "with namespaces.hosts(1): os.kill(os.getpid(), 9)")
    killed = subprocess.Popen([sys.executable, "-c", code])
    killed.wait()

    def left():
        found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return f"pase{killed.pid}-" in found
    assert left()
    with namespaces.hosts(0):
        assert not left()


@pytest.mark.slow
def test_a_plain_model_is_ours(capsys):
    """As many parameters as ours (a row is refused otherwise); a loss that falls; the replicas of one process."""
    config = models.load_config("alexnet", "tiny")
    said = subprocess.run(distribute.command("alexnet", "mirrored", 2, config.batch, 3, 1), capture_output=True,
                          text=True, check=True, timeout=300)
    found = distribute.steps_of(said.stdout)
    assert (found["replicas"], len(found["seconds"]), len(found["losses"])) == (2, 3, 4)
    assert found["losses"][-1] < found["losses"][0]
    assert found["parameters"] == 28_711_626


def test_a_process_that_has_printed_no_times():
    with pytest.raises(RuntimeError, match="printed no times: out of memory"):
        distribute.steps_of("out of memory\n")
    assert distribute.steps_of('x\nsteps: {"seconds": [1.0]}\n') == {"seconds": [1.0]}


def test_a_row_is_kept_where_tf_distribute_fails(capsys):
    """What was measured of ours took minutes; the plain model's steps are those of the half that went well."""
    class Hosts:
        congestion_control, runs = "bbr", 0

        def launch(self, flags):
            return json.loads(json.dumps(_row().summary))

        def distribute(self, model, batch, steps, warmup):
            self.runs += 1
            if self.runs == 2:
                raise RuntimeError("no heartbeat")
            return {"seconds": [0.5] * steps, "parameters": cluster._parameters(model)}

    flags = argparse.Namespace(steps=6, warmup=1, seconds=30.0)
    link = link_of("2080ti", 4, 3e10)
    row = cluster._measure(Hosts(), link, "2080ti", ("2080ti", 4, "transformer", "one"), flags)
    assert row.plain == [500.0] * 3
    assert row.summary["arms"]
    assert "tf.distribute failed after ours: no heartbeat" in capsys.readouterr().err


def test_the_page_tells_where_tf_distribute_failed():
    """It looked like a model that there is no plain one of."""
    once = dataclasses.replace(_row(), failed={"after": "no heartbeat"})
    assert "alexnet on 4 hosts, 2080ti: MultiWorkerMirrored failed after the others (no heartbeat)." in document([once])
    never = dataclasses.replace(_row(), plain=None, failed={"before": "late", "after": "later"})
    cells, = (cells for cells in rows(document([never])) if cells[:3] == ["2080ti", "alexnet", "4"])
    assert cells[4] == "failed"


def test_spreads_of_tf_distribute_are_by_the_launchers_quartiles():
    row = dataclasses.replace(_row(), plain=[12540.0, 12620.0])
    cells, = (cells for cells in rows(document([row])) if cells[:3] == ["2080ti", "alexnet", "4"])
    assert cells[4] == "12,580 ± 20"  # it was 60, of values that are 80 apart
    assert "medians of 2 or 6 steps" in document([row])


def test_runs_of_another_commit_are_not_the_same_runs():
    one, ranks = _row(), _row("ranks", search=80)
    assert "## One client, and a graph per rank" in document([one, ranks])
    for name in ("commit", "processor"):
        other = dataclasses.replace(ranks, facts={**ranks.facts, name: "another"})
        assert "## One client, and a graph per rank" not in document([one, other])


def test_a_first_run_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    """What a worker computes is found out by a run before all rows: it ended in a traceback."""
    class Hosts:
        addresses = ("10.0.0.1",) * 4

        def limit(self, rate):
            """Holds nothing."""

    def fail(self, flags):
        raise RuntimeError("exit code 2: no port")

    monkeypatch.setattr(namespaces, "missing", lambda: "")
    monkeypatch.setattr(namespaces, "hosts", lambda count: contextlib.nullcontext(Hosts()))
    monkeypatch.setattr(cluster.Cluster, "launch", fail)
    assert cluster.main(["--models=alexnet", "--clusters=2080ti", f"--output={tmp_path}"]) == 2
    assert "error: exit code 2: no port" in capsys.readouterr().err


def test_launchers_are_asked_until_they_end_at_once(monkeypatch):
    """At the wish after the last with which they still write files (docs/cluster.md)."""
    now, asked = [0.0], []
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now[-1] + seconds))
    cluster._end([SimpleNamespace(poll=lambda: None, terminate=lambda: asked.append(now[-1]), wait=lambda _: 0)])
    assert len(asked) == 1 + LAST_WISH
    assert all(later - earlier > ONE_WISH for earlier, later in itertools.pairwise(asked))


def test_data_parallelism_over_some_of_the_hosts_is_data_parallelism():
    arms = {"data_parallel_2": {"measured_ms": 20.0, "predicted_ms": 30.0},
            "search": {"measured_ms": 10.0, "predicted_ms": 10.0}}
    row = Row("alexnet", 6, "h100", "one", {}, {"arms": arms}, None, [], {})
    assert (row.milliseconds("data_parallel"), row.speedup("search"), row.predicted()) == (20.0, 2.0, 3.0)


def test_what_the_system_refuses_is_one_line(tmp_path, monkeypatch, capsys):
    """Namespaces can be had, and bridges not: it ended in a traceback that did not say why."""
    known = subprocess.run
    monkeypatch.setattr(namespaces, "missing", lambda: "")
    monkeypatch.setattr(subprocess, "run", lambda command, **how: known(
        ["sh", "-c", "echo Operation not supported >&2; exit 2"] if "bridge" in command else ["true"], **how))
    assert cluster.main(["--models=alexnet", "--clusters=2080ti", f"--output={tmp_path}"]) == 2
    assert "type bridge: Operation not supported" in capsys.readouterr().err


def test_what_is_predicted_of_a_cluster_is_the_simulated_step():
    """The sum of costs, in which nothing overlaps, stood beside what was measured; simulated steps had judged."""
    row = _row()
    row.summary["arms"]["search"]["simulated_ms"] = 50.0
    row.summary["arms"]["data_parallel"]["simulated_ms"] = 300.0
    assert row.predicted() == 6.0
    (cells,) = (cells for cells in rows(document([row])) if cells[:3] == ["2080ti", "alexnet", "4"])
    assert cells[10] == "6.00×"
    assert cells[13:15] == ["300", "50"]
