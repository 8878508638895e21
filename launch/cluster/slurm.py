"""The processes of a job step of Slurm's, as TensorFlow's own resolver tells them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from pase_mtf.errors import UsageError, shortened

__all__ = ["slurm_tasks"]

_FIRST_PORT, _PORTS, _PER_STEP = 12000, 20000, 64
"""Below those that the system gives out by itself; every job step has its own, so that two may share a node."""

# In a process of its own: TensorFlow takes seconds, and hundreds of megabytes that a launcher has no use for. Of GPUs
# nothing is asked (Slurm gives every task its own); without these numbers the resolver divides by them.
_RESOLVE = """
import json, sys
from pase_mtf.compat import tf
resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
    port_base=int(sys.argv[1]), gpus_per_node=int(sys.argv[2]), gpus_per_task=1, auto_set_gpu=False)
print(json.dumps(resolver.cluster_spec().as_dict()["worker"]))
"""


def slurm_tasks(processes: int, environment: Mapping[str, str] | None = None) -> tuple[tuple[str, ...], int]:
    """The addresses of the processes of this job step, by rank, and the rank of this one.

    The resolver sorts nodes by name, Slurm counts tasks in an order of its own: which of the addresses is this
    process's is told by its node and its number there.

    Args:
      processes: how many there are.
      environment: of the process; None: that of this one.

    Raises:
      UsageError: the variables of Slurm's contradict each other, or the resolver does not understand them.
    """
    environment = dict(os.environ if environment is None else environment)
    try:
        step = int(environment.get("SLURM_JOB_ID", "0")) * 7 + int(environment.get("SLURM_STEP_ID", "0"))
        base = _FIRST_PORT + step * _PER_STEP % _PORTS
        local = int(environment.get("SLURM_LOCALID", "0"))
    except ValueError as error:
        raise UsageError(f"--cluster=slurm: {shortened(error)}; start the command by srun") from error
    found = subprocess.run([sys.executable, "-c", _RESOLVE, str(base), str(processes)], env=environment,
                           capture_output=True, text=True, check=False)
    try:
        tasks = tuple(str(task) for task in json.loads(found.stdout))
    except ValueError as error:
        last = (found.stderr.strip().splitlines() or ["no answer"])[-1]
        raise UsageError(f"--cluster=slurm: TensorFlow's resolver says: {shortened(last, 200, quoted=False)}; start "
                         "the command by srun") from error
    mine = f"{environment.get('SLURMD_NODENAME', '')}:{base + local}"
    if len(tasks) != processes or mine not in tasks:
        raise UsageError(f"--cluster=slurm: task {local} of node {environment.get('SLURMD_NODENAME')} is not among "
                         f"those that TensorFlow's resolver finds ({shortened(', '.join(tasks), quoted=False)})")
    return tasks, tasks.index(mine)
