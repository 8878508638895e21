"""What a run prints: header, search summary, progress, a line per logged step."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from pase_mtf.launch.settle import Plan
from pase_mtf.launch.training import Record

__all__ = ["Progress", "Stage", "print_header", "search_summary"]


def print_header(facts: Mapping[str, Any]) -> None:
    """Prints the facts of a run, one per line, aligned."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {value}")
    print(flush=True)


def search_summary(strategy: Any, graph: Any) -> str:
    """One paragraph about the search: its size, its time, what it proved, and the step it predicts, by part."""
    found = strategy.search
    if found.get("simpler"):
        proof = (f"data parallelism, predicted {100 * found['gap']:.2g} % above the optimum: as good, as far as "
                 "predictions tell, and simpler")
    elif found.get("optimal"):
        proof = "optimal (proven)"
    elif found.get("gap") is not None:
        proof = f"at most {100 * found['gap']:.2g} % above the optimum"
    else:
        proof = "no bound"
    parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in strategy.parts.items())
    return (f"search: {len(graph.layers)} layers, {len(graph.edges)} edges, {found.get('configurations', 0)} "
            f"configurations, {found.get('seconds', 0.0):.2f} s, {proof}\n"
            f"predicted step: {1e3 * strategy.seconds:.2f} ms ({parts})")


class Progress:
    """A progress bar over the steps of all arms, and a line per logged step above it."""

    def __init__(self, plan: Plan, arms: int):
        """Starts the bar.

        Args:
          plan: of the run.
          arms: how many arms take part.
        """
        options = plan.options
        # `disable=None`: no bar where nobody watches (a file, a pipe).
        self._bar = tqdm(total=arms * (options.warmup + options.steps), unit="step", desc="training", leave=False,
                         dynamic_ncols=True, mininterval=0.3, disable=None)
        self._batch, self._every, self._first = options.batch, options.log_every, plan.first_step

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *unused: Any) -> None:
        self._bar.close()

    def step(self, record: Record) -> None:
        """Counts a step."""
        self._bar.update(1)
        if (record.step - self._first) % self._every == 0:
            note = "" if record.timed else "  (warm-up)"
            tqdm.write(f"step {record.step:5d}  {record.arm:20s}  loss {record.loss:9.5f}  "
                       f"{self._batch / record.seconds:9.1f} examples/s  {1e3 * record.seconds:8.1f} ms{note}",
                       file=sys.stdout)
            sys.stdout.flush()

class Stage:
    """Prints what is being done, and then how long it took: `with Stage("lowering"): ...`."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> Stage:
        self._start = time.perf_counter()
        if sys.stderr.isatty():
            print(f"{self._what} ...", end="\r", file=sys.stderr, flush=True)
        return self

    def __exit__(self, kind: Any, *unused: Any) -> None:
        seconds = time.perf_counter() - self._start
        print(f"{self._what}: " + ("failed" if kind else f"{seconds:.1f} s"), flush=True)
