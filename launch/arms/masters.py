"""Masters, the whole variables on a host: of a rank that only needs them to fill its slices, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from more_itertools import constrained_batches

from pase_mtf.compat import tf
from pase_mtf.lowering.lowering import PlanLowering

__all__ = ["PassingMasters", "few_at_a_time", "load_values"]

_ELEMENTS_AT_A_TIME = 1 << 26


def few_at_a_time(sizes: Mapping[str, int]) -> Iterator[Sequence[str]]:
    """Names in groups of so many elements as fit into memory: every group costs a look through the graph."""
    return constrained_batches(sizes, _ELEMENTS_AT_A_TIME, get_len=sizes.__getitem__, strict=False)


class PassingMasters:
    """Fills the slices of a rank without holding all masters at once: no rank but the first needs any afterwards."""

    def __init__(self, lowering: PlanLowering, others: Sequence[tf.Variable]):
        """Makes the nodes. To be made while the graph is.

        Args:
          lowering: of the rank.
          others: variables that are no masters; they stay.
        """
        laid_out = [(variable.get_master(), slices) for variable, slices in lowering.variables.items()]
        self._masters = {master.op.name: master for master, _ in laid_out}
        self._fill = {master.op.name: slices.copy_master_to_slices for master, slices in laid_out}
        self._drop = {name: tf.raw_ops.DestroyResourceOp(resource=master.handle)
                      for name, master in self._masters.items()}
        self._others = {variable.op.name: variable for variable in others if variable.op.name not in self._masters}

    def fill(self, run: Callable[..., object], prefix: str | None) -> None:
        """Gives every variable its first value.

        Args:
          run: runs nodes, with what is fed.
          prefix: of the files of a checkpoint that holds the values, of whatever type; None: they are initial.

        Raises:
          tf.errors.OpError: the files are damaged, or hold other variables.
        """
        self._set(run, self._others, prefix)
        for names in few_at_a_time({name: master.shape.num_elements() for name, master in self._masters.items()}):
            self._set(run, {name: self._masters[name] for name in names}, prefix)
            run([self._fill[name] for name in names])
            run([self._drop[name] for name in names])

    @staticmethod
    def _set(run: Callable[..., object], variables: Mapping[str, tf.Variable], prefix: str | None) -> None:
        if prefix is None:
            run([variable.initializer for variable in variables.values()])
        else:
            load_values(run, variables, prefix)


def load_values(run: Callable[..., object], variables: Mapping[str, tf.Variable], prefix: str) -> None:
    """Sets variables, a few at a time, to the values in files, which may be of another type.

    Args:
      run: runs nodes, with what is fed.
      variables: by their names in the files.
      prefix: of the files.

    Raises:
      tf.errors.OpError: they are damaged, or hold other variables.
    """
    reader = tf.train.load_checkpoint(prefix)
    for names in few_at_a_time({name: variable.shape.num_elements() for name, variable in variables.items()}):
        initializers = [variables[name].initializer for name in names]
        run(initializers, {initializer.inputs[1]: reader.get_tensor(name)
                           for name, initializer in zip(names, initializers, strict=True)})
