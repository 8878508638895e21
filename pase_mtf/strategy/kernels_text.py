"""What a strategy that was priced by kernels says of them, for people."""

from __future__ import annotations

from collections.abc import Sequence

from pase_mtf.errors import shortened
from pase_mtf.machine.kernel_times import Circumstances
from pase_mtf.strategy.search_report import PricedByKernels, are_sentences, is_number

__all__ = ["is_report", "kernels_text", "origin_text", "untraced_note", "untraced_text"]

_COUNTS = ("of_strategy", "measured_of_strategy", "seen", "measured", "rounds")

_MOST_NAMED = 3


def is_report(found: object) -> bool:
    """Whether what stands in a file as the "kernels" of a search is what `MeasuredPrices` tells of them."""
    return (isinstance(found, dict) and all(type(found.get(name)) is int and found[name] >= 0 for name in _COUNTS)
            and is_number(found.get("seconds")) and are_sentences(found.get("untraced", [])))


def origin_text(on: Circumstances) -> str:
    """Where kernel times come from.

    Args:
      on: what they were measured on (`calibration.cache.fingerprint_of_kernels`).
    """
    return (f"kernels measured on {on['cores']:g} cores of {on['processor']}, {on['devices']} {on['kind']} devices, "
            f"TensorFlow {on['tensorflow']}")


def kernels_text(search: PricedByKernels) -> str:
    """How many of the kernels of a strategy are measured, of how many that were looked at for it, and what that took;
    empty where its prices are no kernels'.

    Args:
      search: of the strategy.
    """
    found = search.get("kernels")
    if not found:
        return ""
    of, measured = found["of_strategy"], found["measured_of_strategy"]
    text = f"all {of} kernels of it measured" if of == measured else (
        f"{measured} of {of} kernels of it measured, the others estimated")
    text += f", {found['measured']} of {found['seen']} that were looked at for it"
    if found["rounds"]:
        text += f", in {found['rounds']} round{'s' * (found['rounds'] != 1)}"
    return text + (f", {found['seconds']:.1f} s of measuring" if found["seconds"] else "")


def untraced_text(search: PricedByKernels) -> str:
    """What stands for kernels that nobody knows or could time, in one line; empty where there are none.

    Args:
      search: of a strategy.
    """
    return untraced_note(search["kernels"].get("untraced", [])) if search.get("kernels") else ""


def untraced_note(untraced: Sequence[str]) -> str:
    """How many kernels are estimated, and which, the first by name; empty where there are none.

    Args:
      untraced: as in `KernelsReport`.
    """
    if not untraced:
        return ""
    named = "; ".join(shortened(entry, 160, quoted=False) for entry in untraced[:_MOST_NAMED])
    more = f"; and {len(untraced) - _MOST_NAMED} more" if len(untraced) > _MOST_NAMED else ""
    return (f"{len(untraced)} operation{'s' * (len(untraced) != 1)} could not be lowered or timed alone, and "
            f"{'is' if len(untraced) == 1 else 'are'} estimated: {named}{more}")
