"""Data parallelism as people have it today: a plain TensorFlow 2 model under tf.distribute.

    python -m benchmarks.distribute --model=alexnet --strategy=mirrored --devices=8

One process with virtual devices (mirrored), or this process as one of several, which TF_CONFIG names, with a device
each (multi_worker). Prints a line of JSON: what every step took (its batch, its loss fetched), and how many parameters
there are. The benchmarks of speedups start it (`benchmarks.speedup`, `benchmarks.cluster`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pase_mtf import models
from pase_mtf.runtime import operation_threads

__all__ = ["MODELS", "STRATEGIES", "command", "main", "steps_of"]

MODELS = ("alexnet", "transformer")
"""Those that `plain_models` has."""

STRATEGIES = ("mirrored", "multi_worker")
_MARK = "steps: "


def command(model: str, strategy: str, devices: int, batch: int, steps: int, warmup: int) -> list[str]:
    """The command line that measures."""
    return [sys.executable, "-m", "benchmarks.distribute", f"--model={model}", f"--strategy={strategy}",
            f"--devices={devices}", f"--batch={batch}", f"--steps={steps}", f"--warmup={warmup}"]


def steps_of(output: str) -> Mapping[str, Any]:
    """What the process of rank 0 has printed.

    Raises:
      RuntimeError: nothing; it failed.
    """
    for line in reversed(output.splitlines()):
        if line.startswith(_MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    raise RuntimeError(f"tf.distribute: printed no times: {output.strip()[-500:]}")


def _strategy(name: str, devices: int) -> Any:
    """The strategy, and the devices that it needs, before anything else is run."""
    # As `compat` asks for ours: threads for each device. Else all virtual devices share those of the first.
    os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")
    import tensorflow as tf  # takes seconds, and is wanted in a process of its own only
    if name == "multi_worker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    # As our sessions are set up: the devices of one process share its cores.
    tf.config.threading.set_intra_op_parallelism_threads(operation_threads(devices))
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0],
                                               [tf.config.LogicalDeviceConfiguration()] * devices)
    return tf.distribute.MirroredStrategy([f"/cpu:{number}" for number in range(devices)])


def _measure(flags: argparse.Namespace) -> dict[str, Any]:
    strategy = _strategy(flags.strategy, flags.devices)  # before Keras, which starts TensorFlow
    # TensorFlow takes seconds to import, and Keras starts it.
    import tensorflow as tf

    from benchmarks.plain_models import plain_model
    config = models.load_config(flags.model, "tiny", batch=flags.batch)
    with strategy.scope():
        model, loss, batch = plain_model(flags.model, config)
        optimizer = {"sgd": tf.keras.optimizers.SGD, "adam": tf.keras.optimizers.Adam}[config.optimizer](
            config.learning_rate)
        optimizer.build(model.trainable_variables)
    each = flags.batch // strategy.num_replicas_in_sync
    dataset = tf.data.Dataset.from_tensors(batch(each)).repeat().prefetch(2)
    batches = iter(strategy.distribute_datasets_from_function(lambda context: dataset))

    def on_replica(inputs: Any, target: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            mean = loss(inputs, target) / flags.batch
        gradients = tape.gradient(mean, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return mean

    @tf.function
    def step(inputs: Any, target: tf.Tensor) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(on_replica, (inputs, target)), axis=None)

    seconds, losses = [], []
    for _ in range(flags.warmup + flags.steps):
        start = time.perf_counter()
        losses.append(float(step(*next(batches))))
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[flags.warmup:], "losses": losses, "parameters": model.count_params(),
            "replicas": strategy.num_replicas_in_sync}


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, and prints what the steps took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--devices", type=int, default=8, help="of this process (mirrored)")
    parser.add_argument("--batch", type=int, required=True, help="examples per step, on all devices together")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    print(_MARK + json.dumps(_measure(parser.parse_args(arguments))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
