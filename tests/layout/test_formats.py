"""A layout in the words of the frameworks that a program may be ported to."""

import subprocess
import sys
import types

import pytest

from pase_mtf.errors import UsageError
from pase_mtf.layout.formats import FORMATS, format_layout

_MESH, _RULES = (("rows", 2), ("cols", 4)), {"batch": "rows", "d_ff": "cols"}
_VARIABLES = {"w1": ("d", "d_ff"), "scope/b1": ("d_ff",), "scale": (), "table": ("vocab", "d")}


def test_jax(monkeypatch):
    made = types.ModuleType("jax")
    made.make_mesh = lambda *arguments: arguments
    sharding = types.ModuleType("jax.sharding")
    sharding.PartitionSpec = lambda *axes: axes
    monkeypatch.setitem(sys.modules, "jax", made)
    monkeypatch.setitem(sys.modules, "jax.sharding", sharding)
    names = {}
    exec(format_layout(_MESH, _RULES, "jax", _VARIABLES), names)
    assert names["mesh"] == ((2, 4), ("rows", "cols"))
    assert names["logical_axis_rules"] == (("batch", "rows"), ("d_ff", "cols"))
    assert names["partition_specs"] == {"w1": (None, "cols"), "scope/b1": ("cols",), "scale": (), "table": (None, None)}
    exec(format_layout((("all", 8),), {}, "jax", {}), names)
    assert (names["logical_axis_rules"], names["partition_specs"]) == ((), {})


@pytest.mark.slow
def test_dtensor_takes_it():
    """In a process of its own: DTensor wants devices to itself."""
    code = """
import sys
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8)
from tensorflow.experimental import dtensor
dtensor.initialize_accelerator_system("CPU")
names = {}
exec(sys.stdin.read(), names)
shapes = {"w1": (16, 64), "scope/b1": (64,), "scale": (), "table": (32, 16)}
for name, shape in shapes.items():
    value = dtensor.call_with_layout(tf.zeros, names["layouts"][name], shape)
    print(name, [tuple(part.shape) for part in dtensor.unpack(value)])
"""
    result = subprocess.run([sys.executable, "-c", code], input=format_layout(_MESH, _RULES, "dtensor", _VARIABLES),
                            check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    # What stock Mesh-TF gives every device.
    assert result.stdout.splitlines() == [
        f"w1 {[(16, 16)] * 8}", f"scope/b1 {[(16,)] * 8}", f"scale {[()] * 8}", f"table {[(32, 16)] * 8}"]


def test_formats_are_known():
    assert set(FORMATS) == {"flags", "gin", "json", "jax", "dtensor"}
    with pytest.raises(UsageError, match="unknown format 'jaks'; did you mean 'jax'"):
        format_layout(_MESH, _RULES, "jaks", {})
