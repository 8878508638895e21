"""Several processes with a graph each compute what one process computes, and refuse to start where they differ."""

import collections
import itertools
import types

import nets
import numpy as np
import pytest
from rank_worker import cluster_devices, train_case
from ranks import assert_all_ends_or_none, reached, train_on_ranks

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import MismatchError, UsageError
from pase_mtf.graph.partition import Partition
from pase_mtf.lowering import collectives
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.lowering.plans import uniform_plan
from pase_mtf.lowering.ranks import Rank, RankEmitter
from pase_mtf.lowering.reshard import all_reduce, move, reduce_and_move
from pase_mtf.runtime import Devices, session_config


def _same_as_one_process(cases, ranks, folder, *, each=1, tolerance=1e-6):
    found = train_on_ranks(cases, ranks, folder, each=each, seconds=120 + 60 * len(cases))
    devices = Devices.first(ranks * each, "cpu")
    for number, case in enumerate(cases):
        if case.get("differs"):
            assert all("lowered different programs" in str(of_rank[number]["refused"]) for of_rank in found)
            continue
        wanted = train_case({**case, "alone": False}, list(devices.names), config=session_config(devices))
        assert len(wanted["losses"]) == case["steps"]
        for rank, of_rank in enumerate(found):
            for name, value in wanted.items():
                # The masters are collected by the first rank.
                if name != "nodes" and (rank == 0 or not name.startswith("variable/")):
                    np.testing.assert_allclose(
                        of_rank[number][name], value, rtol=tolerance, atol=tolerance * np.abs(value).max(),
                        err_msg=f"{case}, rank {rank}: {name}")


def test_two_ranks_train_as_one_process_does_and_refuse_what_differs(tmp_path):
    """Loops, random numbers, functions of slices, layers on one of the two devices, rows of tables, a type that no
    collective knows; then ranks that disagree."""
    _same_as_one_process([{"name": "odd_functions", "plan": 1, "steps": 2, "alone": True},
                          _tables("all:2", "batch:all"),
                          *_sharded_updates("zero", "random1"),
                          {"name": "mlp", "plan": 1, "dtype": "bfloat16", "steps": 2},
                          {"name": "noisy", "layout": ["all:2", "batch:all"], "steps": 2},
                          {"name": "mlp", "plan": 0, "steps": 1, "differs": 1}], 2, tmp_path)


def _tables(mesh, layout):
    return {"name": "embeddings", "layout": [mesh, layout], "optimizer": "adam", "steps": 2, "alone": True}


@pytest.mark.slow
def test_four_ranks_give_each_other_rows(tmp_path):
    text = [{"name": name, "strategy": "data_parallel", "optimizer": "sgd", "steps": 2}
            for name in ("transformer", "rnnlm")]
    _same_as_one_process([_tables("all:4", "batch:all"), _tables("a:2;b:2", "batch:a;words:b"),
                          _tables("a:2;b:2", "model:a;length:b"), *text], 4, tmp_path)


@pytest.mark.slow
def test_three_ranks_sum_what_is_large(tmp_path):
    _same_as_one_process([{"name": "large_sums", "layout": ["all:3", "batch:all"], "steps": 2}], 3, tmp_path)


def test_ranks_send_rows_of_tables_and_no_tables(monkeypatch):
    """Of three tables rows, of one those of two gathers; of that which something else is added to what is added up."""
    monkeypatch.setattr(collectives, "_KEYS", itertools.count(1))
    devices = cluster_devices(4, 1)
    with tf.Graph().as_default():
        net = nets.build("embeddings", "sgd", tf.float32)
        lowering = PlanLowering(net.graph, uniform_plan(net.graph, "all:4", "batch:all", devices), devices,
                                rank=Rank.of(devices, 0))
    counted = collections.Counter()
    for key, elements in lowering._counters:
        counted[key] += elements
    # Four devices get those of three others, of 2 * 4 words: an index and a row of 8.
    assert counted["allgather/[0]/einsum_op"] == 4 * 4 * 3 * 2 * 4 * (1 + 8)
    assert counted["allreduce/[0]/einsum_op"] == 4 * 64 * 8


def _sharded_updates(*strategies):
    return [{"name": "mlp", "strategy": strategy, "sharded_updates": True, "optimizer": "adam", "steps": 2,
             "alone": True} for strategy in strategies]


@pytest.mark.slow
def test_four_ranks_update_shards_as_one_process_does(tmp_path):
    _same_as_one_process(_sharded_updates("zero", "exact", *(f"random{number}" for number in range(3))), 4, tmp_path)


_PLANS = [{"name": name, "plan": plan, "steps": 2, "alone": plan == 1, "optimizer": ("sgd", "adam")[plan % 2]}
          for number, name in enumerate(nets.NETS) for plan in (number % 2, 1 - number % 2)]
"""Of every net two, which come to either number of devices per process by turns."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "each"), [(4, 1), (2, 2)])
def test_ranks_train_nets_as_one_process_does(ranks, each, tmp_path):
    _same_as_one_process(_PLANS[each - 1::2], ranks, tmp_path, each=each)


def _lowered(name, plan, ranks, monkeypatch, hint="auto"):
    """The lowerings of all ranks, their graphs, and what a program fetches, all in this process."""
    devices, found = cluster_devices(ranks, 1), []
    if hint == "nccl":
        devices = [device.replace("CPU", "GPU") for device in devices]
    for rank in range(ranks):
        monkeypatch.setattr(collectives, "_KEYS", itertools.count(1))
        with tf.Graph().as_default():
            net = nets.build(name, "sgd", tf.float32)
            lowering = PlanLowering(net.graph, nets.random_plan(net.graph, ranks, plan), devices,
                                    rank=Rank.of(devices, rank, communication_hint=hint))
            fetches = [lowering.export_to_tf_tensor(net.loss).op]
            fetches += [lowering.lowered_operation(operation) for operation in net.updates]
            fetches += [laid_out.copy_slices_to_master for laid_out in lowering.variables.values()]
            lowering.agreement()
            found.append((lowering, fetches))
    return found


@pytest.mark.parametrize(("name", "plan", "ranks"), [("mlp", 1, 2), ("mlp", 2, 3), ("odd_functions", 1, 2)])
def test_whatever_is_fetched_all_ends_of_a_transfer_run_or_none(name, plan, ranks, monkeypatch):
    """What one rank would prune and another wait for."""
    found = _lowered(name, plan, ranks, monkeypatch)
    assert len({lowering.emitter.ledger.digest() for lowering, _ in found}) == 1
    assert found[0][0].emitter.ledger.transfers > 10
    assert_all_ends_or_none(found)
    run = reached(found[0][1][0])
    ledger = found[0][0].emitter.ledger
    assert not all(operation in run for own in ledger._own.values() for operation in own), "the loss needs not all"


@pytest.mark.parametrize("layout", ["hidden:all", "batch:all"])
@pytest.mark.parametrize("ranks", [False, True])
def test_what_gpus_need_a_part_of_is_cut_on_their_host(ranks, layout):
    """A GPU need not have room for a whole weight, or for the batch of all."""
    devices = ([f"/job:worker/replica:0/task:{task}/device:GPU:0" for task in range(2)] if ranks else
               ["/device:GPU:0", "/device:GPU:1"])
    with tf.Graph().as_default() as graph:
        net = nets.build("mlp", "sgd", tf.float32)
        PlanLowering(net.graph, uniform_plan(net.graph, "all:2", layout, devices), devices,
                     **({"rank": Rank.of(devices, 0)} if ranks else {})).copy_masters_to_slices()
        cuts = [node for node in graph.get_operations() if node.type in ("Slice", "Split")
                and "GPU" not in node.inputs[node.type == "Split"].device]
    assert cuts
    assert all("CPU:0" in node.device for node in cuts)


def test_nodes_are_made_for_own_devices_only(monkeypatch):
    (lowering, _), *_ = _lowered("transformer", 1, 2, monkeypatch)
    graph = lowering.emitter.ledger._entries and next(iter(lowering.operations.values())).graph
    assert {operation.device for operation in graph.get_operations()} <= {"", "/device:CPU:0", cluster_devices(2, 1)[0]}


def test_what_a_process_reads_of_what_is_imported():
    devices, found = cluster_devices(2, 1), []
    for rank in range(2):
        with tf.Graph().as_default():
            graph = mtf.Graph()
            shape = mtf.Shape([mtf.Dimension("batch", 8), mtf.Dimension("wide", 6)])
            rows = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.zeros([8, 6]), shape)
            lowering = PlanLowering(graph, uniform_plan(graph, "all:2", "batch:all", devices), devices,
                                    rank=Rank.of(devices, rank))
            found.append(lowering.regions(rows))
    assert found == [{((0, 4), (0, 6))}, {((4, 4), (0, 6))}]


def _moved(ranks, source, target, shape, sums=()):
    """The nodes that the first of so many ranks makes for a move, and what kinds of transfers there are."""
    devices = cluster_devices(ranks, 1)
    with tf.Graph().as_default() as graph:
        emitter = RankEmitter(devices, Rank.of(devices, 0))
        source, target = (Partition(tuple(range(ranks)), cuts) for cuts in (source, target))
        block = source.block_shape(shape)
        tensors = [emitter.known(device, emitter.held_on(device, lambda: tf.zeros(block), block, tf.float32))
                   for device in devices]
        before = len(graph.get_operations())
        if sums:
            moved = reduce_and_move(tensors, source, sums, target, shape, emitter)
        else:
            moved = move(tensors, source, target, shape, emitter)
        assert [x.shape.as_list() for x in moved] == [list(target.block_shape(shape))] * ranks
        kinds = {operation.type for operation in graph.get_operations()[before:]}
        return len(graph.get_operations()) - before, {kind for kind in kinds if kind.startswith("Collective")}


@pytest.mark.parametrize(("case", "collective"), [
    (lambda p: ((((p, 1), (1, 1))), ((1, 1), (1, 1))), "CollectiveGatherV2"),
    (lambda p: (((p, 1), (1, 1)), ((1, 1), (p, 1))), "CollectiveAllToAllV2"),
    (lambda p: (((p // 2, 2), (1, 1)), ((1, 1), (1, 1))), "CollectiveGatherV2"),
    (lambda p: (((p // 2, 1), (2, p // 2)), ((1, 1), (2, p // 2))), "CollectiveGatherV2"),
    (lambda p: (((1, 1), (1, 1)), ((p, 1), (1, 1)), ((p, 1),)), "CollectiveAllToAllV2")])
def test_a_move_takes_as_many_nodes_however_many_ranks_there_are(case, collective, monkeypatch):
    # A key that is by chance the size of a group is one constant with it.
    monkeypatch.setattr(collectives, "_KEYS", itertools.count(1000))
    found = []
    for ranks in (8, 16, 32):
        source, target, *sums = case(ranks)
        found.append(_moved(ranks, source, target, (64, 64), *sums))
    assert found[0][1] == {collective}
    assert found == [found[0]] * 3


@pytest.mark.parametrize(("devices", "number", "options", "message"), [
    (["/device:CPU:0"], 0, {}, "full names"),
    (cluster_devices(2, 1), 2, {}, "rank 2: the devices belong to 2 processes"),
    (cluster_devices(2, 1), 0, {"communication_hint": "nccl"}, "one GPU per process"),
    (["/job:worker/replica:0/task:0/device:GPU:0", "/job:worker/replica:0/task:0/device:GPU:1"], 0,
     {"communication_hint": "nccl"}, "one GPU per process")])
def test_ranks_that_cannot_be(devices, number, options, message):
    with tf.Graph().as_default(), pytest.raises(UsageError, match=message):
        PlanLowering(mtf.Graph(), {}, devices, rank=Rank.of(devices, number, **options))


@pytest.mark.parametrize(("ranks", "words", "made", "kind", "merged"), [
    (3, 2000, "CollectiveReduceV2", "SUM", b"Add"), (3, 2000, "CollectiveReduceV2", "MAX", b"Max"),
    (3, 2000, "CollectiveReduceV2", "MIN", b"Min"), (3, 100, "CollectiveGatherV2", "SUM", None),
    (2, 2000, "CollectiveGatherV2", "SUM", None)])
def test_tensorflow_sums_what_is_large_round_its_ring(ranks, words, made, kind, merged, monkeypatch):
    """What a hop is too small for, and what two devices have, all gather."""
    monkeypatch.setattr(collectives, "_KEYS", itertools.count(1))
    devices = cluster_devices(ranks, 1)
    with tf.Graph().as_default() as graph:
        emitter = RankEmitter(devices, Rank.of(devices, 1))
        xs = [emitter.run_on(device, lambda: tf.zeros([words, 16])) for device in devices]
        all_reduce(xs, [range(ranks)], devices, emitter, kind)
        found = [operation for operation in graph.get_operations() if "Collective" in operation.type]
        assert {operation.type for operation in found} == {made}
        assert not merged or {operation.get_attr("merge_op") for operation in found} == {merged}


@pytest.mark.parametrize(("name", "plan", "ranks"), [
    ("mlp", 1, 2), ("mlp", 2, 3), ("mlp", 1, 3), ("odd_functions", 1, 2), ("odd_functions", 1, 3)])
def test_nccl_makes_one_collective_after_the_other_on_every_device(name, plan, ranks, monkeypatch):
    """The same on all ranks, whatever is fetched; and who collects the variables runs nothing of a step."""
    found = _lowered(name, plan, ranks, monkeypatch, "nccl")
    assert len({lowering.emitter.ledger.digest() for lowering, _ in found}) == 1
    assert_all_ends_or_none(found)
    for lowering, fetches in found:
        loss, *rest = fetches
        collects = rest[-len(lowering.variables):]
        made = [operation for operation in loss.graph.get_operations() if operation.type.startswith("Collective")]
        assert all(operation.get_attr("communication_hint") == b"nccl" for operation in made)
        step = reached(loss, *rest[:-len(collects)])
        collecting = reached(*collects)
        assert not any(operation in step for operation in made if operation in collecting)
        _, *orders = (operation for operation in made if operation not in step | collecting)
        assert orders
        for part in (step, collecting, orders):
            _assert_in_a_row([operation for operation in made if operation in part])


def _assert_in_a_row(operations):
    """Each waits for the one before it, in every round of a loop."""
    for before, after in itertools.pairwise(operations):
        assert before in reached(after), (before.name, after.name)


def test_nccl_sums_by_itself_and_one_collective_after_the_other():
    devices = [f"/job:worker/replica:0/task:{task}/device:GPU:0" for task in range(2)]
    with tf.Graph().as_default() as graph:
        net = nets.build("mlp", "sgd", tf.float32)
        spec = MeshSpec(((frozenset({"batch"}), 2),), (0, 1))
        PlanLowering(net.graph, dict.fromkeys(net.graph.operations, spec), devices,
                     rank=Rank.of(devices, 1, communication_hint="nccl"))
        made = [operation for operation in graph.get_operations() if operation.type.startswith("Collective")]
    assert "CollectiveReduceV2" in {operation.type for operation in made}
    assert all(operation.get_attr("communication_hint") == b"nccl" for operation in made)
    for before, after in itertools.pairwise(made):
        assert before in after.control_inputs


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_takes_its_part_of_imported_slices(rank):
    devices = cluster_devices(2, 1)
    with tf.Graph().as_default():
        graph = mtf.Graph()
        made = placement_mesh_impl.PlacementMeshImpl.LaidOutTensor([tf.fill([4, 6], float(k)) for k in range(2)])
        x = mtf.import_laid_out_tensor(mtf.Mesh(graph, "mesh"), made,
                                       mtf.Shape([mtf.Dimension("batch", 8), mtf.Dimension("wide", 6)]))
        lowering = PlanLowering(graph, uniform_plan(graph, "all:2", "batch:all", devices), devices,
                                rank=Rank.of(devices, rank))
        assert isinstance(lowering.stored(x).tensor_list[rank], tf.Tensor)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_has_a_summary_to_fetch(rank):
    devices = cluster_devices(2, 1)
    with tf.Graph().as_default() as tf_graph:
        graph = mtf.Graph()
        x = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.zeros([8]), mtf.Shape([mtf.Dimension("batch", 8)]))
        mtf.scalar_summary("total", mtf.reduce_sum(x))
        PlanLowering(graph, uniform_plan(graph, "all:2", "batch:all", devices), devices, rank=Rank.of(devices, rank))
        (_, value), = tf_graph.get_collection("mtf_scalar_summaries")
        assert isinstance(value, tf.Tensor)
        assert any(operation.type.startswith("Collective") for operation in reached(value.op))


@pytest.mark.parametrize(("ranks", "each"), [(2, 12), (12, 1)])
def test_groups_are_counted_as_tensorflow_counts_them(ranks, each):
    """Processes by the letters of their names, the devices of one by their numbers: else the ranks refuse to run."""
    devices = cluster_devices(ranks, each)
    with tf.Graph().as_default():
        emitter = RankEmitter(devices, Rank.of(devices, 0))
        xs = [emitter.run_on(device, lambda: tf.zeros([2])) for device in devices]
        emitter.exchange.all_gather(devices, xs)
        assert list(emitter.exchange.groups) == [tuple(devices if ranks == 2 else sorted(devices))]


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("sums", [(), ((4, 1),)])
def test_devices_that_made_nothing_of_a_tensor_are_given_it(sums, rank):
    """Four of eight ranks have a block each, or a part of a sum; all need the whole, or a piece of the sum."""
    devices, shape = cluster_devices(8, 1), (64, 64)
    source = Partition((0, 1, 2, 3), ((1, 1) if sums else (4, 1), (1, 1)))
    target = Partition(tuple(range(8)), ((8, 1) if sums else (1, 1), (1, 1)))
    with tf.Graph().as_default():
        emitter = RankEmitter(devices, Rank.of(devices, rank))
        block = source.block_shape(shape)
        tensors = [emitter.known(device, emitter.held_on(device, lambda: tf.zeros(block), block, tf.float32))
                   for device in devices[:4]]
        moved = (reduce_and_move(tensors, source, sums, target, shape, emitter) if sums else
                 move(tensors, source, target, shape, emitter))
        assert [x.shape.as_list() for x in moved] == [list(target.block_shape(shape))] * 8
        assert isinstance(moved[rank], tf.Tensor)


def test_ranks_that_answer_otherwise_or_late_are_refused():
    devices = cluster_devices(3, 1)
    with tf.Graph().as_default():
        emitter = RankEmitter(devices, Rank.of(devices, 0))
        emitter.exchange.all_gather(devices, [emitter.run_on(device, lambda: tf.zeros([2])) for device in devices])
        agreement = emitter.agreement()
    own, late = np.frombuffer(emitter.ledger.digest(), np.int32), tf.errors.DeadlineExceededError(None, None, "late")

    def check(*answers):
        left = list(answers)

        def run(fetches, options=None):
            assert options.timeout_in_ms == 5000
            answer = left.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        agreement.check(types.SimpleNamespace(run=run), 5.0)

    check([own] * 3, [[0, 1, 2]])
    with pytest.raises(MismatchError, match=r"counts the devices .* in the order \[0, 2, 1\]; give one device per"):
        check([own] * 3, [[0, 2, 1]])
    with pytest.raises(MismatchError, match="others on /job:worker/replica:0/task:2/device:CPU:0;"):
        check([own, own, own[::-1]], [[0, 1, 2]])
    for answers in ([late], [[own] * 3, late]):
        with pytest.raises(MismatchError, match="did not compare its program with the others' within 5 s"):
            check(*answers)


def test_ranks_find_the_devices_of_a_mesh_implementation_by_shorter_names():
    full = cluster_devices(2, 1)
    short = [device.replace("/device:CPU:", "/cpu:") for device in full]
    with tf.Graph().as_default():
        net = nets.build("mlp", "sgd", tf.float32)
        impl = placement_mesh_impl.PlacementMeshImpl("all:2", "batch:all", short)
        lowering = PlanLowering(net.graph, dict.fromkeys(net.graph.operations, impl), short, rank=Rank.of(short, 1))
        assert list(lowering.mesh_impl(net.loss).devices) == full


def test_the_devices_of_a_rank_may_be_named_in_any_order():
    devices = cluster_devices(2, 2)
    with tf.Graph().as_default():
        net = nets.build("mlp", "sgd", tf.float32)
        lowering = PlanLowering(net.graph, uniform_plan(net.graph, "all:4", "batch:all", devices), devices,
                                rank=Rank(tuple(reversed(devices[2:]))))
        assert isinstance(lowering.export_to_tf_tensor(net.loss), tf.Tensor)


@pytest.mark.parametrize("make", [lambda: Rank.of(["nix%"], 0), lambda: Rank(("nix%",))])
def test_a_rank_of_what_is_no_device(make):
    with pytest.raises(UsageError, match="no name of a device"):
        make()


def test_what_is_no_device_among_those_of_a_lowering():
    devices = cluster_devices(2, 1)
    with tf.Graph().as_default(), pytest.raises(UsageError, match="no name of a device"):
        RankEmitter([*devices, "nix%"], Rank((devices[0],)))
