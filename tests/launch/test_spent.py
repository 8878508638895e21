"""What planning took."""

import pytest

from pase_mtf.launch.spent import Spent


def test_time_is_counted_once():
    now = iter((0.0, 1.5, 10.0, 14.0, 20.0, 21.0))
    spent = Spent(lambda: next(now))
    with spent.on("reference_kernels"):
        pass
    with pytest.raises(ValueError, match="lost"), spent.on("search"):
        raise ValueError("lost")
    spent.of("kernels", 3.0, out_of="search")
    with spent.on("reference_kernels"):
        pass
    assert spent.seconds == {"compiling": 0.0, "reference_kernels": 2.5, "kernels": 3.0, "search": 1.0,
                             "trial_steps": 0.0, "waiting": 0.0}
    assert spent.text() == "planning took 6.5 s: reference kernels 2.5 s, measuring kernels 3.0 s, searching 1.0 s"
    assert Spent().text() == "planning took 0.0 s"


def test_waiting_for_another_run_is_no_searching():
    now, waited = iter((0.0, 10.0, 20.0, 25.0)), iter((2.0, 8.0, 8.0, 8.0))
    spent = Spent(lambda: next(now), lambda: next(waited))
    with spent.on("search"):
        pass
    with spent.on("reference_kernels"):
        pass
    assert spent.seconds == {"compiling": 0.0, "reference_kernels": 5.0, "kernels": 0.0, "search": 4.0,
                             "trial_steps": 0.0, "waiting": 6.0}
    assert spent.text() == ("planning took 15.0 s: reference kernels 5.0 s, searching 4.0 s, "
                            "waiting for another run's measuring 6.0 s")
