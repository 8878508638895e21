"""The arms of a run: what --strategy and --compare name."""

from __future__ import annotations

import dataclasses
import os

from pase_mtf.errors import UsageError, nearest

__all__ = ["ARM_NAMES", "STOCK", "ArmName", "parse_arms"]

STOCK = "stock_data_parallel"
ARM_NAMES = ("data_parallel", "expert", "search", STOCK, "mcmc", "mcmc_expert", "auto_mtf",
             "random:N", "changed:N")
_DRAWN = ("random", "changed")
_MAX_DRAWN = 64


@dataclasses.dataclass(frozen=True)
class ArmName:
    """One arm.

    Attributes:
      name: in tables and files.
      method: "stock", "data_parallel", "expert", "search", "mcmc", "mcmc_expert", "auto_mtf", "random", "changed"
        (the best strategy with some layers changed at random) or "file".
      argument: number of the strategy that is drawn, or path of the strategy file.
    """

    name: str
    method: str
    argument: str = ""


def parse_arms(strategy: str, compare: str) -> tuple[ArmName, ...]:
    """The arms to measure, the one of --strategy first, stock data parallelism and our own before the others.

    Args:
      strategy: value of --strategy: the arm that is trained, kept and resumed.
      compare: value of --compare: arms separated by commas. `data_parallel` stands for data parallelism through stock
        mtf.Lowering and through ours, so that a speedup is never just our lowering; "none" for nothing.

    Raises:
      UsageError: a name that is no arm.
    """
    main = _arm(strategy, "--strategy")
    if len(main) != 1 or main[0].method in ("stock", *_DRAWN, *_RIVALS):
        raise UsageError(f"--strategy={strategy}: choose one of search, data_parallel, expert, or a strategy file")
    arms = {arm.name: arm for arm in main}
    for item in filter(None, (part.strip() for part in compare.split(","))):
        if item == "none":
            continue
        found = _arm(item, "--compare")
        if item == "data_parallel":
            found = [ArmName(STOCK, "stock"), *found]
        for arm in found:
            if arm.method == "file" and arms.get(arm.name, arm) != arm:
                arm = dataclasses.replace(arm, name=arm.argument)
            arms.setdefault(arm.name, arm)
    return (arms.pop(main[0].name), *sorted(arms.values(), key=lambda arm: _ORDER.index(arm.method)))


_RIVALS = ("mcmc", "mcmc_expert", "auto_mtf")
_PLAIN = ("data_parallel", "expert", "search", *_RIVALS)
_ORDER = ("stock", *_PLAIN, "file", *_DRAWN)


def _arm(item: str, flag: str) -> list[ArmName]:
    method, _, count = item.partition(":")
    if method in _DRAWN and flag == "--compare":
        if not count.isdigit() or not 1 <= int(count) <= _MAX_DRAWN:
            raise UsageError(f"{flag}={item}: say how many {method} strategies, as in {method}:3 "
                             f"(at most {_MAX_DRAWN})")
        return [ArmName(f"{method}_{number}", method, str(number)) for number in range(int(count))]
    if item in _PLAIN:
        return [ArmName(item, item)]
    if item == STOCK:
        return [ArmName(STOCK, "stock")]
    if item.endswith(".json") or os.sep in item or os.path.isfile(item):
        return [ArmName(os.path.splitext(os.path.basename(item))[0] or item, "file", item)]
    names = ARM_NAMES if flag == "--compare" else ARM_NAMES[:3]
    raise UsageError(f"{flag}={item}: no such arm and no strategy file; {nearest(item, names)}")
