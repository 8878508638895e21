"""The processes of a job step of Slurm's, as TensorFlow's own resolver tells them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from pase_mtf.errors import UsageError, shortened

__all__ = ["first_port", "slurm_tasks"]

_FIRST_PORT, _PLACES, _PER_PLACE = 12000, 312, 64
"""Below those that the system gives out by itself."""

_PLACES_APART = 119
"""Of two jobs one after the other: the golden section of all places, with which those of many jobs lie far apart."""

# In a process of its own: TensorFlow takes seconds, and hundreds of megabytes that a launcher has no use for. Of GPUs
# nothing is asked (Slurm gives every task its own); without these numbers the resolver divides by them.
_RESOLVE = """
import json, sys
from pase_mtf.compat import tf
resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
    port_base=int(sys.argv[1]), gpus_per_node=int(sys.argv[2]), gpus_per_task=1, auto_set_gpu=False)
nodes, tasks = resolver._resolve_hostlist(), resolver.cluster_spec().as_dict()["worker"]
print(json.dumps(sorted(tasks, key=lambda task: nodes.index(task.rpartition(":")[0]))))
"""


def first_port(job: int, step: int) -> int:
    """Where the ports of a job step begin on every node: those of its tasks there, and one at which launchers meet.

    So that two may share a node, the first 13 steps of each of 13 jobs in a row have other ports, for up to 63 tasks
    on a node. There are fewer ports than job steps: those of others may be the same.
    """
    return _FIRST_PORT + (job * _PLACES_APART + step) % _PLACES * _PER_PLACE


def slurm_tasks(processes: int, environment: Mapping[str, str] | None = None) -> tuple[tuple[str, ...], int]:
    """The addresses of the processes of this job step, by rank, and the rank of this one.

    The resolver sorts nodes by the letters of their names (cpu10 before cpu9); here they are in Slurm's order, so that
    its task 0, which looks after the folder (`ClusterFlag.rank`), is rank 0. Which of the other addresses is this
    process's is told by its node and its number there.

    Args:
      processes: how many there are.
      environment: of the process; None: that of this one.

    Raises:
      UsageError: the variables of Slurm's contradict each other, or the resolver does not understand them.
    """
    environment = dict(os.environ if environment is None else environment)
    try:
        base = first_port(int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0")))
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
