"""Speedups on a cluster with the balance of the paper's: hosts of this computer, joined by links that are held slow.

    python -m benchmarks.cluster                                    # goes on where it was; needs root
    python -m benchmarks.cluster --models=transformer --clusters=2080ti --again

A host is a network namespace, whose link `tc` holds to the rate at which a worker has as many FLOP a byte as a GPU of
the paper's cluster. The launcher is started on every host as a user starts it, calibrates through these links, and
trains all arms; tf.distribute's MultiWorkerMirroredStrategy trains a plain TensorFlow 2 model of the same size before
and after it, on the same hosts. Namespaces and processes are gone afterwards, also after Ctrl-C. Writes
docs/benchmarks/cluster.json (after every row), cluster.md and cluster.svg.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import distribute, namespaces
from benchmarks.cluster_page import Link, Row, document, plot
from benchmarks.commands import check_results, kept_when_interrupted, told_in_one_line, whole_numbers
from benchmarks.launching import ROOT, commit
from pase_mtf import models
from pase_mtf.files import write_atomically
from pase_mtf.interrupts import LAST_WISH, ONE_WISH
from pase_mtf.launch.console import LOSSES_DISAGREE
from pase_mtf.launch.summary import read_summary
from pase_mtf.machine.machine import Machine
from pase_mtf.runtime import cores, describe_host

__all__ = ["Cluster", "Rows", "link_of", "main", "steps_within"]

FOLDER = ROOT / "docs" / "benchmarks"
_ARMS = ("data_parallel", "expert", "mcmc", "search")
_ARMS_OF_RANKS = ("data_parallel", "search")
_PRESET = "tiny"
_PORT = 2222
_LEAST_STEPS = 3
_OPEN = 1.25e9
"""Bytes/s of a link that holds nothing up here."""
_BUSY = 0.5
"""Load of a core."""
_LIMIT = 2400.0
"""Seconds of a run."""
_ENDS_WITHIN = 20.0


class Cluster:
    """Hosts, and what is run on all of them at once."""

    def __init__(self, hosts: namespaces.Hosts, folder: str):
        """Takes the hosts, and a folder for what is measured and said there."""
        self._hosts, self._folder = hosts, pathlib.Path(folder)
        self._runs = 0
        self._cache = self._folder / "open"

    @property
    def congestion_control(self) -> str:
        """How TCP shares the links of the hosts."""
        return self._hosts.congestion_control

    def limit(self, name: str, rate: float) -> None:
        """Holds the links to a rate, in bytes/s; measurements of links are kept under that name."""
        self._hosts.limit(rate)
        self._cache = self._folder / name

    def launch(self, flags: Sequence[str]) -> dict[str, Any]:
        """One run of the launcher, a device per host: its summary.

        Raises:
          RuntimeError: it failed; holds what it said.
        """
        count, output = len(self._hosts.addresses), self._folder / f"run-{self._runs}"
        tasks = ",".join(f"{address}:{_PORT}" for address in self._hosts.addresses)
        common = [sys.executable, "-m", "pase_mtf.launch", f"--mesh={count}", "--devices=cpu", f"--preset={_PRESET}",
                  "--nocheckpoint", f"--cluster={tasks}", f"--output_dir={output}", *flags]
        self._run([[*common, f"--task={task}"] for task in range(count)], [{}] * count, (0, LOSSES_DISAGREE))
        return dict(read_summary(output / "summary.json"))

    def distribute(self, model: str, batch: int, steps: int, warmup: int) -> dict[str, Any]:
        """A run of a plain model under MultiWorkerMirroredStrategy: what `benchmarks.distribute` prints.

        Raises:
          RuntimeError: it failed; holds what it said.
        """
        workers = [f"{address}:{_PORT}" for address in self._hosts.addresses]
        command = distribute.command(model, "multi_worker", 1, batch, steps, warmup)
        said = self._run([command] * len(workers), [
            {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})}
            for index in range(len(workers))])
        return dict(distribute.steps_of(said))

    def machine(self) -> Machine:
        """What the launcher found of the hosts when it calibrated."""
        path, = (self._cache / "pase_mtf").glob("machine-*.json")
        return Machine.load(path)

    def _run(self, commands: Sequence[Sequence[str]], more: Sequence[Mapping[str, str]],
             allowed: Sequence[int] = (0,)) -> str:
        """Runs a command on every host, with variables of its own, until the first has ended: what that has said."""
        self._runs += 1
        mine = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        mine |= {"XDG_CACHE_HOME": str(self._cache), "MPLCONFIGDIR": str(self._folder / "matplotlib"),
                 "TF_CPP_MIN_LOG_LEVEL": "3"}
        said = [self._folder / f"said-{self._runs}-{host}" for host in range(len(commands))]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for host, command in enumerate(commands):
                with open(said[host], "wb") as file:
                    started.append(subprocess.Popen(
                        self._hosts.on(host, command), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file,
                        stderr=subprocess.STDOUT, start_new_session=True, env={**mine, **more[host]}))
            code = started[0].wait(_LIMIT)
            end = time.monotonic() + _ENDS_WITHIN
            while any(process.poll() is None for process in started) and time.monotonic() < end:
                time.sleep(0.1)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(started)
        text = said[0].read_text(errors="replace")
        if code not in allowed:
            others = [path.read_text(errors="replace").strip()[-300:] for path in said[1:]]
            raise RuntimeError(f"{' '.join(commands[0][1:4])}: " + (
                f"not done after {_LIMIT:.0f} s" if code is None else f"exit code {code}") + ": " + " | ".join(
                    [" ".join(text.split())[-600:], *others]))
        return text


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends those that still run: asked once more than for its files, a launcher ends at once, and with it all that it
    has started."""
    running = [process for process in processes if process.poll() is None]
    for _ in range(1 + LAST_WISH if running else 0):
        for process in running:
            process.terminate()
        time.sleep(1.2 * ONE_WISH)  # sooner it is the same wish
    end = time.monotonic() + _ENDS_WITHIN
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Rows:
    """The rows of cluster.json, written after every one of them: a run that was ended goes on where it was."""

    def __init__(self, stem: str):
        """Reads what there is; a path without ".json", ".md" and ".svg"."""
        self._stem, self._rows = stem, dict[tuple[str, int, str, str], Row]()
        if os.path.exists(f"{stem}.json"):
            for entry in json.loads(pathlib.Path(f"{stem}.json").read_text(encoding="utf-8")):
                row = Row(**entry)
                self._rows[row.key] = row

    def __iter__(self) -> Iterator[Row]:
        """In order of clusters, numbers of hosts, models and clients."""
        return iter([self._rows[key] for key in sorted(self._rows)])

    def __contains__(self, key: tuple[str, int, str, str]) -> bool:
        return key in self._rows

    def flops(self, devices: int) -> float | None:
        """What a worker of so many was measured to compute, where the rows here are of this computer."""
        return next((row.link["flops"] for row in self._rows.values()
                     if row.devices == devices and row.facts["processor"] == describe_host()), None)

    def add(self, row: Row) -> None:
        """Takes a row, and writes all files."""
        self._rows[row.key] = row
        rows = list(self)
        write_atomically(f"{self._stem}.json",
                         json.dumps([dataclasses.asdict(entry) for entry in rows], indent=1) + "\n")
        write_atomically(f"{self._stem}.md", document(rows))
        plot(rows, f"{self._stem}.svg")


def link_of(cluster: str, devices: int, flops: float) -> Link:
    """The links that give workers the balance of a cluster of GPUs.

    Args:
      cluster: a machine of configs/machines.
      devices: how many GPUs; their links are those that join so many.
      flops: of a worker, per second, while all run.
    """
    gpu = Machine.load(cluster)
    gpu.check_devices(devices)
    wire = next(link for link in gpu.links if link.devices >= devices)
    balance = gpu.rates["matmul"] / wire.bandwidth
    return Link(balance, flops, flops / balance)


def steps_within(link: Link, devices: int, parameters: int, most: int, seconds: float) -> int:
    """How many steps are measured: fewer where the links alone would keep data parallelism busy for too long.

    Args:
      link: of the hosts.
      devices: how many.
      parameters: of the model, of four bytes each.
      most: where the links do not matter.
      seconds: that the links may be busy for one arm of data parallelism.
    """
    # What an all-reduce takes from every device and gives to it: all parts but its own, summed and again whole.
    one = 2.0 * 4.0 * parameters * (devices - 1) / devices / link.rate
    return min(most, max(_LEAST_STEPS, int(seconds / one) if one else most))


@functools.cache
def _parameters(model: str) -> int:
    """How many a model has."""
    from pase_mtf.compat import tf  # TensorFlow takes seconds to import
    from pase_mtf.export.exporter import export_graph
    from pase_mtf.launch.arms.program import build_program, variables_by_name
    config = models.load_config(model, _PRESET)
    with tf.Graph().as_default(), variables_by_name():
        program = build_program(models.get(model), config, config.batch, config.optimizer, config.learning_rate, 0)
        return export_graph(program.graph).parameters


def _measure(cluster: Cluster, link: Link, name: str, key: tuple[str, int, str, str], flags: argparse.Namespace) -> Row:
    """Measures a row, on links that are held already.

    Raises:
      RuntimeError: the launcher's run failed.
    """
    _, devices, model, clients = key
    batch = models.load_config(model, _PRESET).batch
    before, plain, parameters, failed = os.getloadavg()[0], list[float](), None, dict[str, str]()
    steps = steps_within(link, devices, _parameters(model), flags.steps, flags.seconds)
    run = [f"--model={model}", f"--steps={steps}", f"--warmup={flags.warmup}", f"--clients={clients}",
           f"--compare={','.join(_ARMS if clients == 'one' else _ARMS_OF_RANKS)}"]
    trains_plain = clients == "one" and model in distribute.MODELS
    summary: dict[str, Any] = {}
    for part in ("plain", "ours", "plain"):
        if part == "ours":
            summary = cluster.launch(run)
        elif trains_plain:
            try:
                found = cluster.distribute(model, batch, math.ceil(steps / 2), flags.warmup)
            except RuntimeError as error:  # its heartbeats may not come through links that it fills
                when = "after" if summary else "before"
                failed[when] = " ".join(str(error).split())[-200:]
                tqdm.write(f"note: {model}: tf.distribute failed {when} ours: {error}", file=sys.stderr)
                continue
            plain += [1e3 * seconds for seconds in found["seconds"]]
            parameters = found["parameters"]
    summary["facts"].pop("output", None)
    if parameters not in (None, _parameters(model)):
        raise RuntimeError(f"{model}: {_parameters(model):,} parameters, the plain model has {parameters:,}")
    return Row(model, devices, name, clients, dataclasses.asdict(link), summary, plain or None,
               [before, os.getloadavg()[0]], {"processor": describe_host(), "commit": commit() or "unknown",
                                              "tcp": cluster.congestion_control}, failed)


def _report(row: Row) -> str:
    found = {arm: row.milliseconds(arm) for arm in (*row.summary["arms"], "MultiWorkerMirrored")}
    return f"{row.cluster}, {row.model} on {row.devices} hosts, clients={row.clients}: " + ", ".join(
        f"{arm} {value:,.0f} ms" for arm, value in found.items() if value) + (
        f"; {row.speedup('search') or 0:.2f}x data parallel, predicted {row.predicted() or 0:.2f}x")


def _rows_wanted(flags: argparse.Namespace) -> list[tuple[str, int, str, str]]:
    named = models.names() if flags.models == "all" else flags.models.split(",")
    of_ranks = [name for name in flags.ranks.split(",") if name in named]
    return [(cluster, devices, name, clients) for devices in whole_numbers("devices", flags.devices)
            for cluster in flags.clusters.split(",") for clients in ("one", "ranks")
            for name in (named if clients == "one" else of_ranks)]


def _measure_all(wanted: Sequence[tuple[str, int, str, str]], rows: Rows, flags: argparse.Namespace,
                 bar: tqdm) -> int:
    """Measures rows of one number of hosts; how many failed."""
    failed, held, devices = 0, "", wanted[0][1]
    with tempfile.TemporaryDirectory(prefix="pase_mtf-cluster-") as folder, namespaces.hosts(devices) as hosts:
        cluster = Cluster(hosts, folder)
        flops = None if flags.again else rows.flops(devices)
        if flops is None:
            cluster.limit("open", _OPEN)
            bar.write(f"{devices} hosts: what a worker computes is measured, over links that hold nothing up",
                      file=sys.stdout)
            if (load := os.getloadavg()[0]) > _BUSY * cores():
                bar.write(f"note: the load of this computer is {load:.1f}: workers compute less than they could, and "
                          "the links will be held to less for it", file=sys.stderr)
            cluster.launch(["--model=alexnet", "--steps=1", "--warmup=1", "--strategy=data_parallel",
                            "--compare=none"])
            flops = cluster.machine().rates["matmul"]
        for key in wanted:
            link = link_of(key[0], devices, flops)
            if held != key[0]:
                cluster.limit(key[0], link.rate)
                held = key[0]
            bar.set_description(f"{key[2]} on {devices} hosts, {key[0]}, {key[3]}")
            try:
                row = _measure(cluster, link, key[0], key, flags)
            except RuntimeError as error:
                bar.write(f"error: {error}", file=sys.stderr)
                failed += 1
            else:
                rows.add(row)
                bar.write(_report(row), file=sys.stdout)
                failed += bool(row.summary.get("disagreement"))
            sys.stdout.flush()
            bar.update()
    return failed


@told_in_one_line(RuntimeError)
@kept_when_interrupted
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing, and writes; returns 1 where a row failed (the others are measured all the same)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="all", help="names separated by commas")
    parser.add_argument("--ranks", default="alexnet,transformer", help="models that are trained with a graph per rank "
                        "as well, of those")
    parser.add_argument("--clusters", default="2080ti,1080ti", help="whose balance")
    parser.add_argument("--devices", default="4", help="numbers of hosts")
    parser.add_argument("--steps", type=int, default=6, help="measured of every arm, at most")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="that the links may be busy with one arm of data "
                        f"parallelism; no fewer than {_LEAST_STEPS} steps are measured")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already, too")
    parser.add_argument("--output", default=str(FOLDER))
    flags = parser.parse_args(arguments)
    if why := namespaces.missing():
        print(f"skipped: {why}", file=sys.stderr)
        return 0
    wanted, stem, failed = _rows_wanted(flags), os.path.join(flags.output, "cluster"), 0
    for cluster, devices, model, _ in wanted:
        models.load_config(model, _PRESET)
        link_of(cluster, devices, 1.0)
    check_results(f"{stem}.json", "[]\n")
    rows = Rows(stem)
    missing = [key for key in wanted if flags.again or key not in rows]
    print(f"{len(missing)} rows to measure", flush=True)
    with tqdm(total=len(missing), unit="row", disable=None) as bar:
        for devices in dict.fromkeys(key[1] for key in missing):
            failed += _measure_all([key for key in missing if key[1] == devices], rows, flags, bar)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
