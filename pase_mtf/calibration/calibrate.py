"""Measures the machine this runs on, through the code that training uses, with all devices busy at once.

Virtual CPU devices (the default) share the cores of one process: what is measured there is the rate of all of them
together. It takes one to three minutes; `load` keeps the numbers until what they were measured on changes.
"""

from __future__ import annotations

import dataclasses

from tqdm import tqdm

from pase_mtf.calibration.cache import check_request, fingerprint, memory_bytes
from pase_mtf.calibration.fit import fit_machine
from pase_mtf.calibration.fit_steps import fit_steps
from pase_mtf.calibration.samples import Samples
from pase_mtf.calibration.sampling import benches
from pase_mtf.calibration.training_steps import STEPS, measure_step
from pase_mtf.compat import tf
from pase_mtf.errors import UsageError
from pase_mtf.machine.machine import Machine

__all__ = ["calibrate"]


def calibrate(devices: int = 8, kind: str = "cpu", *, progress: bool = True) -> Machine:
    """Measures the devices of this machine.

    Matrix products, convolutions, memory traffic, reductions, resharding and all-reduces of several sizes, with all
    devices busy at once, and whole training steps for what these leave unexplained; one to three minutes. Of
    virtual devices the work of the cores is measured, so that others who use the same cores disturb it little.

    Args:
      devices: how many.
      kind: "cpu" (virtual devices of one process, which share its cores) or "gpu".
      progress: show a progress bar.

    Returns:
      The machine "local"; `measured` holds what it was measured on and every sample.

    Raises:
      UsageError: not that many devices of that kind.
    """
    check_request(devices, kind)
    if kind == "gpu" and len(tf.config.list_physical_devices("GPU")) < devices:
        raise UsageError(f"{devices} GPUs: this machine has {len(tf.config.list_physical_devices('GPU'))}; "
                         "use fewer, or virtual CPU devices")
    samples, steps = Samples(), []
    with tqdm(total=STEPS, desc="measuring this machine", disable=None if progress else True, leave=False) as bar:
        for bench in benches(devices, kind):
            bar.total += len(bench)
            bar.refresh()
            samples.update(bench.measure(bar.update))
        for number in range(STEPS):
            steps.append(measure_step(devices, kind, number))
            bar.update()
    shared = kind == "cpu"
    machine = fit_machine(samples, devices, shared, memory_bytes() / (devices if shared else 1))
    where = fingerprint(devices, kind)
    return dataclasses.replace(
        fit_steps(machine, devices, [step for step in steps if step]),
        source=f"measured here on {where['cores']:g} cores of {where['processor']}, {devices} {kind} devices, "
               f"TensorFlow {where['tensorflow']}",
        measured={"on": where, "samples": samples.to_json()})
