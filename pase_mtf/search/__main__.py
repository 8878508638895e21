"""Searches a cost network from the command line: python -m pase_mtf.search FILE.npz --method=exact."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence

from pase_mtf.amounts import parse_bytes
from pase_mtf.errors import UsageError
from pase_mtf.exit_codes import exit_code_of
from pase_mtf.files import check_outputs, says_format, write_atomically
from pase_mtf.flag_text import FlagParser
from pase_mtf.interrupts import Interrupts
from pase_mtf.search import Solution, check_certificate, methods, solve
from pase_mtf.search.network import CostNetwork

__all__ = ["main"]

FORMAT = "pase_mtf.solution"
VERSION = 1

_INTERRUPTED = "interrupted; set --time_limit to get the best so far"
_SMALLER = "take a smaller network, or let the search hold less (--search_memory)"


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="python -m pase_mtf.search", description="Finds the cheapest assignment of a cost network (npz).",
        epilog=f"Methods: {', '.join(methods())}.")
    parser.add_argument("file", nargs="?", help="the network, as CostNetwork.save writes it")
    parser.add_argument("--method", default="exact", help="which search (default: %(default)s)")
    parser.add_argument("--time_limit", type=float, help="seconds after which to stop with what is known (not pase)")
    parser.add_argument("--gap", type=float, default=0.0, help="relative gap at which to stop (exact; default: none)")
    parser.add_argument("--search_memory", metavar="SIZE",
                        help="what the search may hold beside the network: bytes, or 500MB (exact, k_best; default: "
                        "2GiB)")
    parser.add_argument("--memory_limit", metavar="SIZE",
                        help="what the assignment may need per device: bytes, or 11GB (exact; the network has to hold "
                        "memory)")
    parser.add_argument("--seed", type=int, help="of the random numbers (mcmc)")
    parser.add_argument("--proposals", type=int, help="budget in proposals (mcmc)")
    parser.add_argument("--k", type=int, help="how many strategies (k_best)")
    parser.add_argument("--check", action="store_true", help="verify the certificate of the result")
    parser.add_argument("--output", type=os.path.expanduser,  # which no shell does behind "="
                        help="write the solution to this file, as JSON; of those that exist only solutions are "
                        "replaced")
    return parser


def _plain(value: object) -> object:
    """What JSON can hold: no infinities, no tuples."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value


def _describe(network: CostNetwork, method: str, solution: Solution) -> str:
    bound = f"{solution.lower_bound!r}" if math.isfinite(solution.lower_bound) else "none"
    # Rounded up: what nobody has proven is not nothing.
    gap = (f"{math.ceil(1e6 * solution.gap - 1e-6) / 1e4:.4f}% of the cost" if math.isfinite(1e6 * solution.gap)
           else "unknown")
    lines = [f"network      {network!r}", f"method       {method}", f"cost         {solution.cost!r}",
             f"lower bound  {bound}", f"gap          {gap}",
             f"optimal      {'proven' if solution.optimal else 'not proven'}", f"seconds      {solution.seconds:.4f}"]
    for name, value in solution.statistics.items():
        if isinstance(value, (int, float, str)):
            lines.append(f"{name.replace('_', ' '):<24} {value}")
    for number, (cost, _) in enumerate(solution.statistics.get("strategies", ())):
        lines.append(f"strategy {number + 1:<4} {cost!r}")
    return "\n".join(lines)


def _check(network: CostNetwork, solution: Solution) -> None:
    if not solution.optimal:
        raise UsageError("--check: the solution is not proven, there is nothing to verify; allow more of what you "
                         "limited (--time_limit, --search_memory, --gap), or leave --check out")
    if solution.certificate is None:
        raise UsageError("--check: the solution is proven, but no certificate was found before time, memory or thirty "
                         "times the search's time were over; allow more of what you limited, or leave --check out")
    check_certificate(network, solution)
    print("certificate  verified")


def _run(arguments: Sequence[str] | None) -> int:
    flags = _parser().parse_args(arguments)
    if flags.file is None:
        raise UsageError("no network named; give the npz file to search")
    search_memory, memory_limit = (  # a network names no device
        None if given is None else parse_bytes(given, flag, of_device=False) for flag, given in (
            ("--search_memory", flags.search_memory), ("--memory_limit", flags.memory_limit)))
    options = {name: value for name, value in {"search_memory": search_memory, "seed": flags.seed,
                                               "proposals": flags.proposals, "k": flags.k}.items()
               if value is not None}
    if flags.check and (flags.method != "exact" or flags.memory_limit is not None):
        raise UsageError("--check: only --method=exact without --memory_limit makes a certificate; leave it out")
    check_outputs({"--output": flags.output}, [("the search", flags.file)],
                  may_replace=lambda path: says_format(path, FORMAT), otherwise=": only solutions are replaced")
    network = CostNetwork.load(flags.file)
    if flags.method == "exact" and flags.memory_limit is None:
        # It takes longer than the search on some networks; but nothing else proves what is left of costs that cancel.
        options["certificate"] = flags.check or network.extremes[0] < 0.0
    if flags.memory_limit is not None:
        if network.memory is None:
            raise UsageError(f"--memory_limit={flags.memory_limit}: {flags.file} holds no memory; save a network "
                             "whose `memory` is set")
        # A method without a limit names the first: the flag.
        options.update(memory_limit=memory_limit, memory=network.memory)
    solution = solve(network, flags.method, time_limit=flags.time_limit, gap=flags.gap, progress=True, **options)
    try:
        if flags.output is not None:
            _write(flags.output, flags.method, solution)
    finally:  # what was found is there whatever comes of one of the two, or of the check
        print(_describe(network, flags.method, solution), flush=True)
    if flags.check:
        _check(network, solution)
    return 0


def _write(path: str, method: str, solution: Solution) -> None:
    write_atomically(path, json.dumps({
        "format": FORMAT, "version": VERSION, "method": method, "assignment": solution.assignment,
        "cost": solution.cost, "lower_bound": _plain(solution.lower_bound), "gap": _plain(solution.gap),
        "optimal": solution.optimal, "seconds": solution.seconds,
        "statistics": _plain(solution.statistics)}) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code: 0, or that of the error, which goes to stderr as one line."""
    with Interrupts(at_once=False) as interrupts:
        return exit_code_of(lambda: _run(arguments), interrupts, interrupted=_INTERRUPTED, smaller=_SMALLER)


if __name__ == "__main__":
    sys.exit(main())
