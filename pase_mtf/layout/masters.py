"""Graphs that are only looked at need no variables: a placeholder stands for each master, which is built far sooner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pase_mtf.compat import mtf, tf
from pase_mtf.replaced import replaced

__all__ = ["placeholder_masters"]


@contextlib.contextmanager
def placeholder_masters() -> Iterator[None]:
    """Within the block the master of an mtf.Variable is a placeholder of its name, dtype and shape.

    TensorFlow's variables are most of what building a graph of Mesh-TF takes (handle, initial value, assignment and
    read of every slot). Variables that the program makes by itself are as ever.
    """
    making = False

    def noting(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: mtf.Variable, *args: object, **kwargs: object) -> None:
            nonlocal making
            before, making = making, True
            try:
                original(self, *args, **kwargs)
            finally:
                making = before
        return init

    def create(next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
        if not making:
            return next_creator(**kwargs)
        with tf.name_scope(None):
            return tf.placeholder(kwargs["dtype"], kwargs["shape"], name=kwargs["name"])

    with replaced(mtf.Variable, "__init__", noting), tf.variable_creator_scope(create):
        yield
