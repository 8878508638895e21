"""What is kept of compiled code."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from pase_mtf.search import compiled
from pase_mtf.search.elimination import _eliminate


def cache_file(folder, stamp="one"):
    return compiled._SafeCacheFile(str(folder), "function", stamp)


def test_kernels_are_kept_so():
    assert isinstance(_eliminate._cache._cache_file, compiled._SafeCacheFile)


def test_what_returns_arrays_counts_references():
    def tail(values: np.ndarray) -> "np.ndarray":
        return values[1:]
    with pytest.raises(TypeError, match="tail returns an array"):
        compiled.compiled(allocates=False)(tail)


def test_two_that_save_at_once_keep_to_their_own(tmp_path):
    one, other = cache_file(tmp_path), cache_file(tmp_path)
    one.save("int", b"code for integers")
    other.save("float", b"code for floats")
    one.save("int", b"the same, anew")
    assert [other.load("int"), one.load("float"), one.load("text")] == [b"the same, anew", b"code for floats", None]
    assert len(list(tmp_path.glob("*.nbc"))) == 2


def test_where_nothing_can_be_locked(tmp_path, monkeypatch):
    for error in (NotImplementedError(), OSError(errno.ENOLCK, "No locks available")):
        monkeypatch.setattr("filelock.FileLock.acquire", lambda self, error=error: (_ for _ in ()).throw(error))
        cache_file(tmp_path).save("int", b"code")
        assert cache_file(tmp_path).load("int") == b"code"


def test_one_that_dies_leaves_no_index_of_old_code(tmp_path, monkeypatch):
    cache_file(tmp_path).save("int", b"old code")
    new = cache_file(tmp_path, "two")
    monkeypatch.setattr(new, "_save_data", lambda name, data: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        new.save("float", b"new code")
    assert cache_file(tmp_path, "two").load("float") is None
    cache_file(tmp_path, "two").save("float", b"new code")
    assert cache_file(tmp_path, "two").load("float") == b"new code"
    assert cache_file(tmp_path, "two").load("int") is None


def test_nothing_old_is_kept(tmp_path):
    """Of the function when it was another, stood in another line, or was being kept when the process was killed; what
    is of other functions and other interpreters stays."""
    def at(name, stamp="one"):
        return compiled._SafeCacheFile(str(tmp_path), name, stamp)
    others = ["module.fold-7.py312", "module.fold_up-7.py311", "module.unfold-7.py311", "model.fold-7.py311"]
    for name in ["module.fold-7.py311", *others]:
        at(name).save("int", b"old code")
    (tmp_path / "module.fold-7.py311.12.nbc.tmp.34").touch()
    new = at("module.fold-9.py311", "two")
    new.save("int", b"new code")
    new.save("float", b"code for floats")
    at("module.fold-9.py311", "three").save("int", b"newest code")
    assert at("module.fold-9.py311", "three").load("int") == b"newest code"
    assert [at(name).load("int") for name in others] == [b"old code"] * len(others)
    left = {path.name.split(".nb")[0].rpartition(".")[0] if path.suffix == ".nbc" else path.name.split(".nb")[0]
            for path in tmp_path.iterdir()}
    assert left == {"module.fold-9.py311", *others}
    assert len(list(tmp_path.glob("*.nbc"))) == 1 + len(others)


def test_any_module_that_changed_counts(tmp_path):
    (tmp_path / "inner").mkdir()
    for path, text, changed in ((tmp_path / "a.py", "@compiled", 1), (tmp_path / "inner" / "b.py", "@compiled", 10**9),
                                (tmp_path / "inner" / "c.py", "", 10**10)):
        path.write_text(text)
        os.utime(path, ns=(1, changed))
    assert compiled._newest(tmp_path) == 10**9
    compiled._newest.cache_clear()
    os.utime(tmp_path / "inner" / "b.py", ns=(1, 10**9 + 1))
    assert compiled._newest(tmp_path) == 10**9 + 1


@pytest.mark.slow
def test_a_link_to_a_module_finds_what_is_kept_for_it(tmp_path):
    """So do the tests under Bazel, each of which sees the modules through links of its own."""
    module = "from pase_mtf.search.compiled import compiled\n@compiled\ndef twice(number):\n    return 2 * number\n"
    script = "import linked; linked.twice(3); print(sum(linked.twice.stats.cache_hits.values()))"
    (tmp_path / "module.py").write_text(module)
    printed = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "linked.py").symlink_to(tmp_path / "module.py")
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                             env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"),
                                  "PYTHONPATH": os.pathsep.join([str(tmp_path / folder), *filter(None, sys.path)])})
        printed.append(run.stdout.strip())
    assert printed == ["0", "1"]
