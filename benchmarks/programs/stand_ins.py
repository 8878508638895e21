"""Modules that the programs import and that building their graphs never calls, where they are not installed.

`mesh_tensorflow.transformer` and `mesh_tensorflow.experimental` read data and drive estimators as well as build models.
For that they want tensorflow_datasets, the estimators for TPUs (gone since TensorFlow 2.16), tensorflow.contrib (gone
since 2.0) and pkg_resources (gone from new versions of setuptools). The models use none of them, so an empty module of
that name is enough; whoever calls something in it gets an AttributeError that names it.
"""

from __future__ import annotations

import importlib.util
import sys
import types

__all__ = ["TRAINING", "stand_in"]

TRAINING = ("tensorflow_datasets", "pkg_resources", "tensorflow.python.tpu.tpu_config",
            "tensorflow.python.tpu.tpu_estimator")
"""What `mesh_tensorflow.transformer` imports for its training loop."""


class _StandIn(types.ModuleType):

    def __getattr__(self, name: str) -> None:
        raise AttributeError(f"{self.__name__}.{name}: the module is a stand-in (benchmarks/programs/stand_ins.py); "
                             "install the real one to use it")


def stand_in(name: str, *, always: bool = False) -> None:
    """Puts an empty module in the place of one that cannot be imported.

    Args:
      name: of the module, dotted.
      always: whether it is there and fails while it is imported.
    """
    if name not in sys.modules and (always or importlib.util.find_spec(name) is None):
        sys.modules[name] = _StandIn(name)
