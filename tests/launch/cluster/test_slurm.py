"""Job steps of Slurm's by their variables, through TensorFlow's resolver."""

import pytest

from pase_mtf.errors import UsageError
from pase_mtf.launch.cluster.slurm import slurm_tasks

pytestmark = pytest.mark.slow  # the resolver is asked in a process of its own, which loads TensorFlow

_STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "cpu[09-10]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
         "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
         "SLURMD_NODENAME": "cpu10"}


def test_two_nodes(monkeypatch):
    for name, value in _STEP.items():
        monkeypatch.setenv(name, value)
    assert slurm_tasks(4) == (("cpu09:12448", "cpu09:12449", "cpu10:12448", "cpu10:12449"), 3)


def test_what_is_refused(monkeypatch):
    for name, value in _STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "x")
    with pytest.raises(UsageError, match="start the command by srun"):
        slurm_tasks(4)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(UsageError, match=r"TensorFlow's resolver says: .*SLURM_STEP_NODELIST"):
        slurm_tasks(4)
