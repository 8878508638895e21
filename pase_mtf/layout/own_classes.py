"""What a person is told of the Operation classes of a program's own: what trying them showed, and what to register."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pase_mtf.compat import mtf
from pase_mtf.layout.layout import LayoutCost
from pase_mtf.operations.registry import names_of, trial_of
from pase_mtf.operations.trial import Trial

__all__ = ["own_class_notes"]


def own_class_notes(operations: Sequence[mtf.Operation], costs: Iterable[LayoutCost]) -> tuple[str, ...]:
    """Notes on operations of classes without a rule.

    Args:
      operations: of such classes.
      costs: layouts that people would like to see among the answers; those that are not known to be legal are named.

    Returns:
      A line per class that could be tried; one for all that could not, with what registers them; one per layout.
    """
    of_class: dict[type, list[tuple[mtf.Operation, Trial]]] = {}
    for operation in operations:
        trial = trial_of(operation)
        if trial is not None:
            of_class.setdefault(type(operation), []).append((operation, trial))
    notes, untried = [], {}
    for cls, entries in of_class.items():
        if any(trial.untried for _, trial in entries):
            untried[cls] = entries
        else:
            whole = {name for _, trial in entries for name in trial.whole}
            splits = [name for name in dict.fromkeys(name for _, trial in entries for name in trial.splits)
                      if name not in whole]
            notes.append(f"note: {cls.__name__}: splits {', '.join(splits) or 'nothing'}"
                         + (f", not {', '.join(sorted(whole))}" if whole else "") + ", found by trying")
    if untried:
        notes.append(_untried_note(untried))
        names = " and ".join(cls.__name__ for cls in untried)
        notes += [f"warning: {cost.name} ({cost.mesh_shape};{cost.layout_rules}) was kept out: not known to be legal "
                  f"under it: {names}" for cost in costs if cost.problem and not cost.known]
    return tuple(notes)


def _untried_note(untried: dict[type, list[tuple[mtf.Operation, Trial]]]) -> str:
    """Names the classes and why they could not be tried, with a stub to paste for each."""
    why, stub = [], []
    for cls, entries in untried.items():
        reason = next(trial.untried for _, trial in entries if trial.untried)
        why.append(f"{cls.__name__} ({reason})")
        names = sorted({name for operation, _ in entries for name in names_of(operation)
                        if not name.startswith("_anonymous_")})
        # What is defined in a function is known there alone.
        outer, _, name = cls.__qualname__.rpartition("<locals>.")
        stub += [f"    # in {outer.rstrip('.')} of {cls.__module__}, behind the class:" if outer else
                 f"    from {cls.__module__} import {name.partition('.')[0]}",
                 f"    pase_mtf.register_operation({name}, splittable=[])  # some of: {', '.join(names)}"]
    return (f"note: not known to be legal: {', '.join(why)}; their dims stay whole; say before the search which may be "
            "split:\n" + "\n".join(stub))
