"""--cluster and --task: over which processes a run goes, and which of them this one is."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from pase_mtf.errors import UsageError, shortened

__all__ = ["MAX_PROCESSES", "ClusterFlag", "parse_cluster"]

MAX_PROCESSES = 256

_FORMS = "give local:4, slurm, tf_config, or host1:port,host2:port"
_WHOLE = "[0-9]{1,9}"
_CLIENTS = ("chief", "master")
"""What TF_CONFIG calls the process that is not one of the workers: it becomes rank 0."""


@dataclasses.dataclass(frozen=True)
class ClusterFlag:
    """What the user said about processes.

    Attributes:
      kind: "local", "slurm", "tf_config" or "hosts".
      processes: how many.
      tasks: the address ("host:port") of each, by rank; empty where they are found out later (local, slurm).
      rank: which of them this process is to start; None: all of them (local).
    """

    kind: str
    processes: int
    tasks: tuple[str, ...] = ()
    rank: int | None = None


def parse_cluster(text: str, task: int | None, environment: Mapping[str, str] | None = None) -> ClusterFlag:
    """Reads the values of --cluster and --task.

    Args:
      text: value of --cluster.
      task: value of --task; None where it is not given.
      environment: of the process; None: that of this one.

    Raises:
      UsageError: it does not parse, lacks what it refers to, or names a task that there is not.
    """
    environment = os.environ if environment is None else environment
    kind = text.partition(":")[0]
    if kind in ("local", "slurm", "tf_config") and task is not None:
        raise UsageError(f"--task={task}: only for a --cluster that lists its hosts; leave it out")
    if kind == "local":
        count = text.partition(":")[2]
        if not re.fullmatch(_WHOLE, count) or not 1 <= int(count) <= MAX_PROCESSES:
            raise UsageError(f"--cluster={text}: say how many processes, 1 to {MAX_PROCESSES}, as in local:4")
        return ClusterFlag("local", int(count))
    if text == "slurm":
        return _slurm(environment)
    if text == "tf_config":
        return _tf_config(environment)
    if ":" not in text:
        raise UsageError(f"--cluster={shortened(text, quoted=False)}: unknown; {_FORMS}")
    tasks = _addresses(text.split(","), f"--cluster={shortened(text, quoted=False)}")
    if task is None:
        raise UsageError(f"--cluster={shortened(text, quoted=False)}: --task is missing; start the same command on "
                         f"every host, with --task=0 on the first, up to --task={len(tasks) - 1}")
    if not 0 <= task < len(tasks):
        raise UsageError(f"--task={task}: --cluster lists {len(tasks)} processes; give 0 to {len(tasks) - 1}")
    return ClusterFlag("hosts", len(tasks), tasks, task)


def _slurm(environment: Mapping[str, str]) -> ClusterFlag:
    found = {}
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
        value = environment.get(name, "")
        if not re.fullmatch(_WHOLE, value):
            raise UsageError(f"--cluster=slurm: {name} is {shortened(value) if value else 'not set'}; start the "
                             "command by srun")
        found[name] = int(value)
    count, rank = found["SLURM_STEP_NUM_TASKS"], found["SLURM_PROCID"]
    if not 1 <= count <= MAX_PROCESSES or rank >= count:
        raise UsageError(f"--cluster=slurm: task {rank} of {count}; at most {MAX_PROCESSES} processes can be driven")
    return ClusterFlag("slurm", count, (), rank)


def _tf_config(environment: Mapping[str, str]) -> ClusterFlag:
    text = environment.get("TF_CONFIG")
    if not text:
        raise UsageError("--cluster=tf_config: TF_CONFIG is not set; set it as Kubernetes' TFJob does, or list the "
                         "hosts: --cluster=host1:port,host2:port --task=0")
    try:
        config: Any = json.loads(text)
        jobs, task = config["cluster"], config["task"]
        job, index = task["type"], _index(task["index"])
        tasks = {name: [str(address) for address in jobs[name]] for name in jobs}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"TF_CONFIG={shortened(text)}: is not what TensorFlow writes ({type(error).__name__}: "
                         f"{shortened(error)}); give cluster, and task with type and index") from error
    order = [*(name for name in _CLIENTS if name in tasks), *(["worker"] if "worker" in tasks else [])]
    foreign = sorted(set(tasks) - {*_CLIENTS, "worker", "evaluator"})
    if foreign:
        raise UsageError(f"TF_CONFIG: has tasks of type {shortened(foreign[0])}; all have to be chief or worker")
    if job not in order or not 0 <= index < len(tasks[job]):
        raise UsageError(f"TF_CONFIG: this process is task {index} of type {shortened(job)}, which is not among those "
                         f"of its cluster ({', '.join(order) or 'none'})")
    rank = sum(len(tasks[name]) for name in order[:order.index(job)]) + index
    addresses = _addresses([address for name in order for address in tasks[name]], "TF_CONFIG")
    return ClusterFlag("tf_config", len(addresses), addresses, rank)


def _index(value: object) -> int:
    """The index of a task: a whole number, however it is written, or the text of one.

    Raises:
      ValueError: it is none.
    """
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
    if not re.fullmatch(_WHOLE, text):
        raise ValueError(f"index is {shortened(value, 24)}")
    return int(text)


def _addresses(parts: list[str], where: str) -> tuple[str, ...]:
    """Addresses of processes, checked.

    Raises:
      UsageError: one is no "host:port", or stands there twice.
    """
    tasks = tuple(part.strip() for part in parts)
    for task in tasks:
        host, _, port = task.rpartition(":")
        if not _is_host(host) or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
            raise UsageError(f"{where}: {shortened(task)} is no host:port; {_FORMS}")
        if tasks.count(task) > 1:
            raise UsageError(f"{where}: {task} stands there twice; give every process an address of its own")
    if len(tasks) > MAX_PROCESSES:
        raise UsageError(f"{where}: {len(tasks)} processes, at most {MAX_PROCESSES} can be driven")
    return tasks


def _is_host(text: str) -> bool:
    """Whether it may be a host's name, or is an address of IPv6 in brackets; whether there is such a host is not known
    before it is looked for."""
    try:
        return bool(re.fullmatch(r"[\w.-]+|\[[0-9A-Fa-f:.]+\]", text) and text.encode("idna"))
    except UnicodeError:  # an empty part between two dots, or one of more than 63 characters
        return False
