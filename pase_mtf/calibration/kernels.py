"""Times kernels: TensorFlow's own nodes, as the lowering emits them, on all devices at once.

Many kernels stand in one graph and are run one after the other in one session. A kernel is emitted several times on
every device, one after the other there; so the devices keep each other from the cores and the caches as they do in a
training step. What starting and ending a run takes is measured in the same session, and taken off.

Of a kernel that follows another TensorFlow's executor knows at once that it is next. In a training step many nodes are
ready beside each other, and others wait for them on other threads, which takes longer than the work of a small one.
What that takes is measured in every session, too, by one tiny kernel: many of them in a row, and as many beside each
other, for each of which a node of the first device waits.

What comes from other devices was just made there, by another thread, and lies in the cache of another core; it is sent
for every reader anew. So the inputs of kernels that lie apart are made again for every run of these, on their devices,
and what making them takes by itself is taken off: sending them stays a part of the kernel.

What computes element by element reads what the kernel before it has just made, and is timed in runs that follow each
other, which find it in the caches: traces of steps show such times, on processors of two kinds. (To make it again for
every run, and take off what that takes, is nearer yet to what some take that write over it; but the difference of two
long runs errs by more than it is, and kernels that seem to take nothing would be the bound of all others.) Of what
products and convolutions read, some lies in the caches, as it was just made, and some does not: weights, and what the
backward pass reads again. So these are timed twice: in runs that follow each other, and in runs that follow one of
every other kernel of the session; the mean of both counts.

And in a step every device runs a kernel once, and then another: only those of some microseconds are repeated in a run,
for the sake of the clock. Eight runs of one in a row found code and weights in the caches (up to a third too short). Of
a kernel that reads what one like it has just read (`Kernel.again`) several are run in a row, whatever they take: all
but the first find it in the caches.

Whoever else uses the host makes everything slower for a while, never faster. So all kernels of a session are looked at
several times over, and the best of these counts; and two kernels that stand in every session tell when it was disturbed
for longer: then all of it is timed again, and the less disturbed try counts. Where that lasts, it is told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from more_itertools import constrained_batches

from pase_mtf.calibration.nodes import BELONGS_TO, Nodes
from pase_mtf.compat import graph_of_nodes, tf
from pase_mtf.host import available_bytes
from pase_mtf.machine.kernel_times import DISTURBED
from pase_mtf.machine.kernels import SENT, TINY, Kernel, Timing
from pase_mtf.machine.references import PROBES
from pase_mtf.runtime import Devices, cores, runnable_cores, session_config, thread_seconds

__all__ = ["KernelTimer", "KernelWatch", "plain_config"]

_SPREAD = 0.05
_PASSES = 3
_LEAST_RUNS, _MOST_RUNS = 2, 30  # in a pass, one after the other
_ROUNDS = 2  # of a pass, of all kernels of a session in turn
_SECONDS = 0.01  # of such runs of a kernel in a pass, where their times differ by more
_RUN_SECONDS = 4e-3  # of one run, where the kernel takes about as long as expected
_RUN_SECONDS_ON_CORES = 2.5e-4  # and where devices share cores: what is longer is run once on each, as in a step
_RUN_SECONDS_OVER_PROCESSES = 2e-2
_REPEATS = 8  # at most, of a kernel on every device: making a node takes longer than running it
_MOST_RUN_SECONDS = 0.1  # of one run of a kernel that is repeated for what it reads again
_REPEATS_ALONE = 64  # of a kernel that has its device for itself: to start a run takes as long as dozens of them
_BATCH = 24  # kernels: TensorFlow looks through a whole graph at the first run of each
_BATCH_BYTES = 1 << 30
_LEAST_SECONDS = 5e-7  # of a kernel that cannot be told from none
_LEAST_SHARE = 2e-8  # of one of devices that share cores, before what dispatching it takes: no more than hides in noise
_TRIES = 2  # of what was disturbed
_WATCHED = 2  # looks at what is watched
_SESSIONS = 5  # that tell what it takes to dispatch a node from thread to thread, where no table does
_WAITING = 1.1  # of shared cores: how much longer a run may take than the work of the cores; steps take 1.02 to 1.12

_IDLE = Kernel("NoOp", (), ())
_IN_A_ROW, _BESIDE = Kernel("InARow", (), ()), Kernel("Beside", (), ())
_IDLE_AGAIN = Kernel("NoOpAgain", (), ())  # the same as _IDLE, in runs that follow each other
_ONLY_AGAIN = frozenset({_IDLE_AGAIN, _IN_A_ROW, _BESIDE, TINY, *PROBES})
"""What is not timed after others: what tells how long it takes to dispatch a node, of which to wake the threads of a
session is no part, and what tells how fast the machine is, whatever else a session holds."""
_MAKING = "Making"
"""What stands for making the inputs of a kernel, among those that are looked at."""
_TINY_REPEATS = 16  # on every device, of either
_probed_seconds: dict[tuple[Devices, Kernel], list[float]] = {}
"""What probes took in every session of this process."""
_dispatches: dict[Devices, list[float]] = {}
"""What it took to dispatch a node from thread to thread, of every session of this process."""


class KernelTimer:
    """Times kernels on one number of devices.

    Attributes:
      failed: kernels that cannot be timed here, and why.
      disturbed: how many kernels were timed while others slowed the machine, each time that they were.
    """

    def __init__(self, devices: int, kind: str = "cpu", expected: Callable[[Kernel], float] | None = None,
                 over: Devices | None = None, tiny: float | None = None, best: Mapping[Kernel, float] | None = None,
                 ) -> None:
        """Measures nothing yet.

        Args:
          devices: how many, all of which are busy while a kernel is timed.
          kind: "cpu" (virtual devices of one process, which share its cores) or "gpu".
          expected: about how long a kernel of a GPU takes, in seconds, by what is known of its speed.
          over: the same devices, where they belong to several processes, whose servers answer: then what is found is
            what a kernel takes one of them while all are busy, whoever shares whose cores.
          tiny: seconds of `TINY` in the table that what is found belongs to: as long as it took to hand that from
            thread to thread it is taken to take now, for it differs from hour to hour by more than kernels do.
          best: seconds that kernels took in that table; the probes among them tell whether all is slower now.
        """
        self._expected, self._tiny, self._best = expected, tiny, best or {}
        self._devices = over or Devices.first(devices, kind)
        self._shared = kind == "cpu" and over is None
        self.failed: dict[Kernel, str] = {}
        self.disturbed = 0

    def time(self, kernels: Sequence[Kernel], seconds: float = np.inf,
             progress: Callable[[int], object] = lambda count: None) -> Iterator[dict[Kernel, Timing]]:
        """Times kernels, batch by batch.

        Args:
          kernels: those to time, the most important ones first.
          seconds: nothing more is begun after so many; a batch that was is finished.
          progress: called with the number of kernels that are done with, after each batch.

        Yields:
          The kernels of a batch and their times, without those that `failed`.
        """
        begin = time.perf_counter()
        if self._shared and self._tiny is None:
            for _ in range(_SESSIONS - len(_dispatches.get(self._devices, ()))):
                if time.perf_counter() - begin >= seconds:  # of many devices, one takes seconds
                    return
                _Bench(self._devices, self._shared, {}).measure([])
        for batch in self._batches([kernel for kernel in kernels if kernel not in self.failed]):
            if time.perf_counter() - begin >= seconds:
                return
            yield self._undisturbed(batch)
            progress(len(batch))

    def _undisturbed(self, batch: Sequence[Kernel]) -> dict[Kernel, Timing]:
        """The times of a batch: of the calmest of a few tries, where the probes among it took longer than before."""
        found, calmest = dict[Kernel, Timing](), np.inf
        bench = _Bench(self._devices, self._shared, self.failed, self._expected, self._tiny)
        for _ in range(_TRIES):
            timings = bench.measure([*PROBES, *(kernel for kernel in batch if kernel not in PROBES)])
            probed = {probe: timings[probe].seconds for probe in PROBES if probe in timings}
            for probe, seconds in probed.items():
                _probed_seconds.setdefault((self._devices, probe), []).append(seconds)
            slowed = self._slowed(probed)
            if slowed < calmest:  # all of it: what was taken off in a disturbed try may have been too much
                found, calmest = timings, slowed
            if slowed <= DISTURBED:
                break
        else:
            self.disturbed += sum(kernel in found for kernel in batch)
        told = tuple(found[probe].seconds for probe in PROBES) if all(probe in found for probe in PROBES) else ()
        return {kernel: dataclasses.replace(found[kernel], probed=told) for kernel in batch if kernel in found}

    def _slowed(self, probed: Mapping[Kernel, float]) -> float:
        """How many times as long as when nobody disturbs it a probe took: as in the table, or in the best quarter of
        this process's sessions. The best of all is an accident.

        Args:
          probed: seconds of every probe, in the last session.
        """
        return max((seconds / min(float(np.percentile(_probed_seconds[self._devices, probe], 25)),
                                  self._best.get(probe, seconds)) for probe, seconds in probed.items()), default=1.0)

    def _batches(self, kernels: Iterable[Kernel]) -> Iterator[Sequence[Kernel]]:
        room = (available_bytes() or 4 * _BATCH_BYTES) // 4
        most = min(_BATCH_BYTES, room)
        fitting = list[Kernel]()
        for kernel in kernels:
            nbytes = self._held_bytes(kernel)
            if nbytes > max(2 * most, room):  # one alone may take what is there
                self.failed[kernel] = f"it takes {nbytes / 1e9:.1f} GB on {self._devices.count} devices"
            else:
                fitting.append(kernel)
        return constrained_batches(fitting, most, _BATCH, self._held_bytes, strict=False)

    def _held_bytes(self, kernel: Kernel) -> int:
        """What the tensors of a kernel take, on all devices."""
        return kernel.nbytes * self._devices.count


def _take_shorter(found: dict[Kernel, Timing], timings: Mapping[Kernel, Timing]) -> None:
    """Takes in what is shorter than what was found, or new."""
    for kernel, timing in timings.items():
        if kernel not in found or timing.seconds < found[kernel].seconds:
            found[kernel] = timing


class KernelWatch:
    """Times a few kernels again and again, in one session that stays open."""

    def __init__(self, kernels: Sequence[Kernel], devices: int, kind: str = "cpu", waiting: bool = False,
                 tiny: float | None = None) -> None:
        """Opens the session.

        Args:
          kernels: what is timed.
          devices, kind, tiny: of `KernelTimer`: what is compared with a table is dispatched as it is there.
          waiting: what they wait for cores that others use is part of their time, as it is of a step's.
        """
        self._bench = _Bench(Devices.first(devices, kind), kind == "cpu", {}, tiny=tiny, waiting=waiting)
        self._open = contextlib.ExitStack()
        self._look = self._open.enter_context(self._bench.opened(kernels))

    def seconds(self) -> dict[Kernel, float]:
        """What one run of every kernel takes now, on all devices at once: the shorter of two looks, as what is kept is
        the shortest of several."""
        found = dict[Kernel, Timing]()
        for _ in range(_WATCHED):
            _take_shorter(found, self._look())
        return {kernel: timing.seconds for kernel, timing in self._bench.of_one(found).items()}

    def close(self) -> None:
        """Ends the session."""
        self._open.close()


def plain_config(devices: Devices) -> tf.ConfigProto:
    """How the sessions are set up that time nodes: as those that train, but equal nodes are not merged into one."""
    config = session_config(devices)
    config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
    return config


def _reads_what_was_just_made(kernel: Kernel) -> bool:
    """Whether all that it reads, but for variables that it assigns to, is what the kernels before it have made."""
    return (kernel.family == "pointwise" and not kernel.again and "Gather" not in kernel.operation  # of a table
            and kernel.operation not in BELONGS_TO)


def _making(kernel: Kernel) -> Kernel:
    """What stands for making the inputs of a kernel."""
    return kernel._replace(operation=_MAKING)


_SPOILING = ValueError, TypeError, KeyError, tf.errors.OpError
"""What a kernel that cannot be timed raises: text, say, of which no tensor is made."""


class _Bench:
    """Some kernels in one graph and session."""

    def __init__(self, devices: Devices, shared: bool, failed: dict[Kernel, str],
                 expected: Callable[[Kernel], float] | None = None, tiny: float | None = None,
                 waiting: bool = False) -> None:
        self._expected, self._tiny, self._waiting = expected, tiny, waiting
        self._devices, self._shared, self._failed = devices, shared, failed
        self._config = plain_config(devices)
        self._after_others = set[Kernel]()

    def measure(self, kernels: Sequence[Kernel]) -> dict[Kernel, Timing]:
        """Times all of them; where one of them spoils the graph for all, each by itself."""
        try:
            return self._measure(kernels)
        except _SPOILING as error:
            if len(kernels) == 1:
                self._fail(kernels[0], error)
                return {}
        sound = [kernel for kernel in kernels if self._is_sound(kernel)]
        if len(sound) < len(kernels):
            return self.measure(sound)  # together: alone none of them would follow others
        found: dict[Kernel, Timing] = {}
        for kernel in kernels:
            found.update(self.measure([kernel]))
        return found

    def _is_sound(self, kernel: Kernel) -> bool:
        """Whether it runs in a session of its own; else it has failed."""
        try:
            with self.opened([kernel]):
                return True
        except _SPOILING as error:
            self._fail(kernel, error)
            return False

    def _fail(self, kernel: Kernel, error: Exception) -> None:
        """Notes why a kernel cannot be timed."""
        self._failed[kernel] = " ".join(str(error).split())[:200]

    @contextlib.contextmanager
    def opened(self, kernels: Sequence[Kernel]) -> Iterator[Callable[[], dict[Kernel, Timing]]]:
        """A session in which each call times every kernel, whose runs nothing has been taken off, and an idle run."""
        nodes = Nodes(self._devices)
        names = {kernel: nodes.kernel(kernel, self._repeats(kernel), fresh=self._is_fresh(kernel))
                 for kernel in kernels}
        half_cold = [kernel for kernel in kernels if self._is_half_cold(kernel)]
        self._after_others = {_IDLE, *half_cold, *map(_making, filter(self._has_making, half_cold))}
        names |= {_making(kernel): nodes.making(kernel, self._repeats(kernel))
                  for kernel in kernels if self._has_making(kernel)}
        for kernel, beside in self._dispatching():
            names[kernel] = nodes.kernel(TINY, _TINY_REPEATS, beside)
        names[_IDLE] = names[_IDLE_AGAIN] = nodes.idle()
        fill = nodes.group(nodes.fills)
        graph, targets = graph_of_nodes(nodes.definition, [*names.values(), fill])
        with tf.Session(self._devices.target, graph=graph, config=self._config) as session:
            session.run(targets[fill])
            runs = {kernel: session.make_callable(targets[name]) for kernel, name in names.items()}
            for run in runs.values():
                run()  # TensorFlow looks through a whole graph at the first run of each
            yield lambda: self._look(runs)

    def _measure(self, kernels: Sequence[Kernel]) -> dict[Kernel, Timing]:
        found: dict[Kernel, Timing] = {}
        with self.opened(kernels) as look:
            for _ in range(_PASSES):
                _take_shorter(found, look())
        timings = self.of_one(found)
        if self._dispatching():
            _dispatches.setdefault(self._devices, []).append(self._dispatch_now(found))
        return timings

    def of_one(self, looked: Mapping[Kernel, Timing]) -> dict[Kernel, Timing]:
        """What one run of each kernel takes in a step, by what `opened` tells."""
        dispatch = self._dispatch_seconds(looked)
        return {kernel: self._of_one(kernel, timing, looked[self._without(kernel)],
                                     0.0 if kernel.operation == SENT else dispatch)  # what is only sent is no node
                for kernel, timing in looked.items()
                if kernel not in (_IDLE, _IDLE_AGAIN, _IN_A_ROW, _BESIDE) and kernel.operation != _MAKING}

    def _without(self, kernel: Kernel) -> Kernel:
        """What stands for a run of a kernel without the kernel."""
        if self._has_making(kernel):
            return _making(kernel)
        return _IDLE if self._is_half_cold(kernel) else _IDLE_AGAIN

    def _is_half_cold(self, kernel: Kernel) -> bool:
        """Whether it is timed after others as well: some of what it reads was not just made."""
        return kernel not in _ONLY_AGAIN and not (self._shared and _reads_what_was_just_made(kernel))

    def _of_one(self, kernel: Kernel, timing: Timing, without: Timing, dispatch: float) -> Timing:
        """What one run of a kernel takes, by what a run of all of them took, and one without them."""
        each = (timing.seconds - without.seconds) / self._runs(self._repeats(kernel))
        return dataclasses.replace(timing, seconds=max(each, self._least) + dispatch)

    @property
    def _least(self) -> float:
        return _LEAST_SHARE if self._shared else _LEAST_SECONDS

    def _is_fresh(self, kernel: Kernel) -> bool:
        """Whether its inputs are made anew for every run: those that other devices of this process made."""
        return kernel.apart and self._shared and self._devices.count > 1

    def _has_making(self, kernel: Kernel) -> bool:
        """Whether its runs make what it reads."""
        return self._is_fresh(kernel) or kernel.operation in BELONGS_TO

    def _runs(self, repeats: int) -> int:
        """How many kernels a run waits for, one after the other."""
        return repeats * (self._devices.count if self._shared else 1)

    def _dispatching(self) -> Sequence[tuple[Kernel, bool]]:
        """What tells how long it takes to dispatch a node from thread to thread. Of GPUs nothing: they compute
        meanwhile. Nor of several processes: to start a run of these takes as long as sending hundreds of nodes."""
        return ((_IN_A_ROW, False), (_BESIDE, True)) if self._shared else ()

    def _dispatch_seconds(self, looked: Mapping[Kernel, Timing]) -> float:
        """What it takes: as much as in the table that this belongs to, or else as in the best quarter of this and the
        sessions of this process in which kernels were measured: it differs from one to the next, and while others use
        the machine it is several times as long."""
        if not self._dispatching():
            return 0.0
        if self._tiny is None:
            known = [*_dispatches.get(self._devices, ()), self._dispatch_now(looked)]
            return max(0.0, float(np.percentile(known, 25)))
        alone = (looked[_IN_A_ROW].seconds - looked[_IDLE_AGAIN].seconds) / self._runs(_TINY_REPEATS)
        return max(0.0, self._tiny - max(alone, self._least))

    def _dispatch_now(self, looked: Mapping[Kernel, Timing]) -> float:
        """What it took in one session."""
        return (looked[_BESIDE].seconds - looked[_IN_A_ROW].seconds) / self._runs(_TINY_REPEATS)

    def _repeats(self, kernel: Kernel) -> int:
        """How often a kernel is emitted on every device: more often where it takes little. GPUs differ by orders of
        magnitude in what they take: there it follows what is known of the speed of those at hand."""
        long = _RUN_SECONDS_ON_CORES if self._shared else _RUN_SECONDS
        least, seconds = (2, _MOST_RUN_SECONDS) if kernel.again else (1, long)
        # To start a run of several processes takes as long as many kernels.
        alone = _RUN_SECONDS_OVER_PROCESSES if self._devices.tasks else _RUN_SECONDS
        if not self._shared and self._expected is not None:
            return int(np.clip(alone / max(self._expected(kernel), _LEAST_SECONDS), least, _REPEATS_ALONE))
        expected = kernel.flops / 2e10 + kernel.nbytes / 5e9 + 3e-6
        if self._devices.tasks:
            return int(np.clip(alone / expected, least, _REPEATS_ALONE))
        together = expected * (self._devices.count / cores() if self._shared else 1.0)
        return int(np.clip(seconds / together, least, _REPEATS))

    def _look(self, runs: Mapping[Kernel, Callable[[], object]]) -> dict[Kernel, Timing]:
        """What a run of every kernel takes: of runs that follow each other; or, where some of what it reads is not at
        hand in a step, the mean of these and of such as follow others."""
        apart = {kernel: _Clocked() for kernel in runs if kernel in self._after_others}
        for _ in range(_ROUNDS):
            for kernel, run in runs.items():
                if kernel in apart:
                    with apart[kernel].counting():
                        apart[kernel].run(run)
                elif kernel not in (_IDLE_AGAIN, _IN_A_ROW, _BESIDE):
                    run()  # not for its own sake: what comes next finds the caches as after others
        return {kernel: self._mean(self._in_a_row(run), *([apart[kernel]] if kernel in apart else []))
                for kernel, run in runs.items()}

    def _in_a_row(self, run: Callable[[], object]) -> _Clocked:
        """As many runs as bring the spread below 5 %, or take the time."""
        clocked = _Clocked()
        run()
        begin = time.perf_counter()
        with clocked.counting():
            while True:
                clocked.run(run)
                long = time.perf_counter() - begin
                if len(clocked.walls) >= _LEAST_RUNS and (
                        len(clocked.walls) >= _MOST_RUNS or long > _SECONDS
                        or (clocked.spread < _SPREAD and long > 0.2 * _SECONDS)):
                    return clocked

    def _mean(self, *clocked: _Clocked) -> Timing:
        """Of several series of runs, the mean of what each says that one takes, and all that is known of their spread.

        On cores that others use as well a run is longer than its work: then no more waiting is taken for a part of the
        kernels than there is in a step. Within a quota of fewer cores than there are a run may be shorter than its
        work: it has all of them until the quota is used up, and only then is everything stopped, as in longer steps.
        """
        seconds, within = [], cores()
        for series in clocked:
            taken, work = series.median, series.work / len(series.walls)
            if self._shared and not self._waiting:
                # Of more cores than devices some have nothing to do: nobody else took these.
                taken = min(taken, work / min(within, self._devices.count) * _WAITING)
            if self._shared and within < runnable_cores():
                taken = max(taken, work / within)
            seconds.append(taken)
        return Timing(float(np.mean(seconds)), max(series.spread for series in clocked),
                      sum(len(series.walls) for series in clocked))


class _Clocked:
    """A series of runs: what each took, and what the threads of this process have computed in all of them."""

    def __init__(self) -> None:
        self.walls: list[float] = []
        self.work = 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """What is computed within the block is work of the runs."""
        before = thread_seconds()
        yield
        self.work += sum(seconds - before.get(thread, 0.0) for thread, seconds in thread_seconds().items())

    def run(self, run: Callable[[], object]) -> None:
        """One more run."""
        begin = time.perf_counter()
        run()
        self.walls.append(time.perf_counter() - begin)

    @property
    def median(self) -> float:
        """Of what they took."""
        return statistics.median(self.walls)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        low, median, high = statistics.quantiles(self.walls, n=4, method="inclusive")  # NumPy's takes as long as a run
        return 0.5 * (high - low) / median
