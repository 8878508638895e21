import pytest

from pase_mtf.errors import UsageError
from pase_mtf.launch import devices
from pase_mtf.launch.devices import available_bytes, choose_devices, describe_host


@pytest.fixture
def gpus(monkeypatch):
    def present(*names):
        monkeypatch.setattr(devices, "_gpus", lambda: list(names))
    return present


def test_auto_takes_gpus_where_there_are_enough(gpus):
    gpus("A100", "A100")
    assert choose_devices("auto", 2).names == ("/device:GPU:0", "/device:GPU:1")
    assert choose_devices("auto", 2).models == "A100"
    assert choose_devices("auto", 4).names == tuple(f"/device:CPU:{number}" for number in range(4))
    assert choose_devices("cpu", 2).kind == "cpu"


@pytest.mark.parametrize(("present", "count", "says"), [
    ((), 8, r"--mesh=8: more GPUs than there are \(0\); use --devices=cpu"),
    (("A100",), 8, r"--mesh=8: more GPUs than there are \(1\); use --mesh=1 or less"),
])
def test_more_gpus_than_there_are(gpus, present, count, says):
    gpus(*present)
    with pytest.raises(UsageError, match=says):
        choose_devices("gpu", count)


def test_a_list(gpus):
    gpus("A100")
    assert choose_devices("/device:CPU:3,/device:CPU:1", 2).names == ("/device:CPU:3", "/device:CPU:1")
    assert choose_devices("/device:GPU:0", 1).kind == "gpu"


@pytest.mark.parametrize(("flag", "count", "says"), [
    ("/device:CPU:0", 2, "names 1 devices, --mesh wants 2"),
    ("/device:CPU:0,/device:CPU:0", 2, "named twice"),
    ("/device:TPU:0", 1, "no device name"),
    ("/device:CPU:x", 1, "no device name"),
    ("/device:GPU:7", 1, "more GPUs than there are"),
    ("/device:CPU:0,/device:GPU:0", 2, "mixed"),
    ("gpus", 2, "did you mean 'gpu'"),
])
def test_refuses(gpus, flag, count, says):
    gpus("A100")
    with pytest.raises(UsageError, match=says):
        choose_devices(flag, count)


def test_host():
    assert "core" in describe_host()
    assert available_bytes() is None or available_bytes() > 0
