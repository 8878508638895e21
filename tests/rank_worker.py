"""One of several processes that train small programs over all their devices, each with a graph of its own.

    python tests/rank_worker.py RANK PORTS DEVICES CASES OUTPUT

PORTS: of all ranks on this host, joined by commas. DEVICES: of each rank. CASES: JSON, a list of what `train_case`
takes. OUTPUT: a file for what came out, as npz.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from typing import Any

import harness
import nets
import numpy as np

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import MismatchError
from pase_mtf.export.exporter import export_graph
from pase_mtf.launch.arms.program import build_program
from pase_mtf.lowering.lowering import PlanLowering, lower
from pase_mtf.lowering.plans import uniform_plan
from pase_mtf.lowering.ranks import Rank, run_options


def cluster_devices(ranks: int, each: int) -> list[str]:
    """The full names of all devices."""
    return [f"/job:worker/replica:0/task:{rank}/device:CPU:{number}" for rank in range(ranks) for number in range(each)]


def _program(case: dict[str, Any]) -> Any:
    name = case["name"]
    if name in nets.NETS | nets.OTHERS:
        return nets.build(name, case.get("optimizer", "sgd"), tf.as_dtype(case.get("dtype", "float32")))
    config = models.load_config(name, case.get("preset", "tiny"))
    return build_program(models.get(name), config, config.batch, case.get("optimizer", config.optimizer),
                         config.learning_rate, seed=3)


def _batches(case: dict[str, Any], program: Any) -> Any:
    if case["name"] in nets.NETS | nets.OTHERS:
        return iter([{}] * case["steps"])
    config = models.load_config(case["name"], case.get("preset", "tiny"))
    batches = harness.model_batches(case["name"], config)
    return ({program.placeholders[key]: value for key, value in next(batches).items()} for _ in range(case["steps"]))


def train_case(case: dict[str, Any], devices: list[str], rank: int | None = None, target: str = "",
               config: tf.ConfigProto | None = None) -> dict[str, np.ndarray]:
    """Trains a program; the losses, further outputs, the variables, and how many nodes the lowering made.

    Args:
      case: "name" of a net or a model, "steps", "plan" (the seed of a random plan), "layout" (mesh shape and layout
        rules of all operations) or "strategy" (a kind that `harness.find` knows); perhaps "preset", "optimizer",
        "dtype" (of a net), "sharded_updates" (of a strategy's graph), "alone" (whether the loss is fetched by itself,
        too), and "differs" (added to the seed for every rank).
      devices: names of all.
      rank: of this process; None: one process makes all nodes.
      target, config: of the session.
    """
    with tf.Graph().as_default() as graph:
        program = _program(case)
        step = getattr(program, "global_step", None)
        options = {} if rank is None else {"rank": Rank.of(devices, rank)}
        before = len(graph.get_operations())
        if "plan" in case:
            seed = case["plan"] + (rank or 0) * case.get("differs", 0)
            lowering = PlanLowering(program.graph, nets.random_plan(program.graph, len(devices), seed), devices,
                                    None if step is None else step.read_value(), **options)
        elif "layout" in case:
            plan = uniform_plan(program.graph, *case["layout"], devices)
            lowering = PlanLowering(program.graph, plan, devices, None if step is None else step.read_value(),
                                    **options)
        else:
            exported = export_graph(program.graph, sharded_updates=case.get("sharded_updates", False))
            strategy = harness.find(case["strategy"], exported, len(devices))
            lowering = lower(program.graph, strategy, devices, None if step is None else step.read_value(), **options)
        loss = lowering.export_to_tf_tensor(program.loss)
        outputs = [lowering.export_to_tf_tensor(tensor) for tensor in getattr(program, "outputs", [])]
        updates = [lowering.lowered_operation(operation) for operation in program.updates]
        with tf.control_dependencies([*updates, loss]):
            train = tf.no_op() if step is None else tf.assign_add(step, 1).op
        fill, collect = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
        agreement = lowering.agreement()
        nodes = len(graph.get_operations()) - before
        masters = {variable.name: variable.get_master() for variable in program.graph.trainable_variables}
        with tf.Session(target, config=config) as session:
            steps = {} if rank is None else {"options": run_options()}
            session.run(tf.global_variables_initializer())
            for name, master in masters.items():
                values = np.random.default_rng(zlib.crc32(name.encode())).normal(0.1, 0.3, master.shape.as_list())
                master.load(values, session)
            session.run(fill)
            if agreement is not None:
                try:
                    agreement.check(session)
                except MismatchError as error:
                    return {"refused": np.asarray(str(error))}
            losses, found = [], []
            for batch in _batches(case, program):
                # The loss alone, too: what it needs of other ranks, they have to send.
                alone = session.run(loss, batch, **steps) if case.get("alone") else None
                value, found, *_ = session.run([loss, outputs, updates, train], batch, **steps)
                assert alone is None or abs(alone - value) <= 1e-6 * abs(value), (alone, value)
                losses.append(value)
            session.run(collect, **steps)
            variables = session.run(masters)
    # NumPy's files know no bfloat16.
    return {"losses": np.asarray(losses, np.float64), "nodes": np.asarray(nodes),
            **{f"output/{number}": np.asarray(value, np.float64) for number, value in enumerate(found)},
            **{f"variable/{name}": value for name, value in variables.items()}}


def _config(rank: int, each: int) -> tf.ConfigProto:
    config = tf.ConfigProto(device_count={"CPU": each}, intra_op_parallelism_threads=1, inter_op_parallelism_threads=4)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    config.device_filters.append(f"/job:worker/task:{rank}")
    return config


def main() -> None:
    """Runs the cases of the command line."""
    rank, ports, each, cases, output = sys.argv[1:]
    hosts = [f"localhost:{port}" for port in ports.split(",")]
    config = _config(int(rank), int(each))
    server = tf.train.Server(tf.train.ClusterSpec({"worker": hosts}), job_name="worker", task_index=int(rank),
                             protocol="grpc", config=config)
    found = {}
    for number, case in enumerate(json.loads(cases)):
        print(rank, case, file=sys.stderr, flush=True)
        made = train_case(case, cluster_devices(len(hosts), int(each)), int(rank), server.target, config)
        found.update({f"{number}/{key}": value for key, value in made.items()})
    np.savez(f"{output}.part.npz", **found)
    os.rename(f"{output}.part.npz", output)
    # A server has no end but that of its process; the others may still read from it.
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()
