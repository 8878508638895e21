"""checkpoint/: the master variables of the trained arm, the last two that were written, each whole or not there.

Masters do not depend on the strategy, so a training can be resumed on another mesh, or under another strategy. A
checkpoint is written beside the others, brought to the disk and renamed; its manifest holds the size and the SHA-256 of
every file, and one of itself. What is found is checked against it without TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import filelock
from typing_extensions import NotRequired, TypedDict

from pase_mtf.errors import FormatError, UsageError
from pase_mtf.files import check_schema, read_json, remove_partial, take_lock, write_atomically
from pase_mtf.launch.console import summarize_error
from pase_mtf.launch.run_folder import MANIFEST, checkpoint_steps, names_in

__all__ = ["KEPT", "MAX_STEP", "CheckpointInfo", "FileEntry", "entry_of", "find_checkpoint",
           "forget_checkpoints_after", "forget_half_written", "restore", "save_checkpoint"]

FORMAT = "pase_mtf.checkpoint"
VERSION = 2
"""Version 1, which is still read, had one checkpoint, and of its files the sizes only."""

KEPT = 2
"""So many checkpoints are kept: where the disk damages the last, there is the one before."""

MAX_STEP = 2**31 - 1
"""Steps are fed to the models (dropout draws by them) as 32-bit integers."""

_PREFIX = "model"
_PARTIAL = ".partial-"
_LOCK = ".writing.lock"
_CHUNK = 1 << 22


class _LaterVersionError(FormatError):
    """A whole checkpoint that a later version of this program has written."""


class FileEntry(TypedDict):
    """What a manifest says of a file: its size and its SHA-256."""

    bytes: int
    sha256: str


class _Manifest(TypedDict):
    """What a manifest holds; version 1 had no hashes, and of a file its size alone."""

    format: str
    version: int
    step: int
    graph_hash: str
    files: dict[str, FileEntry | int]
    next_loss: NotRequired[float | None]
    order: NotRequired[int]
    microbatches: NotRequired[int]
    recompute: NotRequired[list[str]]
    sha256: NotRequired[str]


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that was checked: complete, undamaged and ours.

    Attributes:
      folder: where its files lie.
      step: training steps done.
      graph_hash: of the program whose variables it holds.
      next_loss: the loss of that step, the first that is not done, under the strategy it was trained with; None where
        that is not known.
      order: in which the examples come whose losses the run tells (`data.ORDER`); 1 of runs before there was another.
      microbatches: in how many of them that program computes a batch; None of runs that did not tell yet.
      recompute: names of the blocks that it computes once more; None as well.
    """

    folder: str
    step: int
    graph_hash: str
    next_loss: float | None = None
    order: int = 1
    microbatches: int | None = None
    recompute: Sequence[str] | None = None

    @property
    def prefix(self) -> str:
        """What tf.train.Saver restores from."""
        return os.path.join(self.folder, _PREFIX)


def save_checkpoint(folder: str, save: Callable[[str], Mapping[str, FileEntry] | None], *, step: int, graph_hash: str,
                    next_loss: float | None = None, order: int = 1, microbatches: int | None = None,
                    recompute: Sequence[str] | None = None, spared: int | None = None) -> None:
    """Writes a checkpoint beside the others, renames it into place, and removes all but the last two.

    Killed at any moment, it leaves the earlier ones as they were.

    Args:
      folder: of all checkpoints of a run.
      save: writes the variables to files with the prefix it is given. It may return entries of files, by their names:
        of those that others have written, brought to the disk, and read for their hashes.
      step: training steps done; a checkpoint of that step that is there already is kept as it is.
      graph_hash: of the program.
      next_loss, order, microbatches, recompute: see CheckpointInfo.
      spared: the step of one that is not removed, however old it is: somebody may go back to it yet.

    Raises:
      UsageError: it cannot be written (disk full, no permission).
    """
    place = os.path.join(folder, f"step-{step}")
    if os.path.isdir(place):
        with _as_usage_errors(place), _write_lock(folder, wait=True):
            _remove_old(folder, spared)
        return
    with _as_usage_errors(place), _removed_where_empty(folder), contextlib.ExitStack() as stack:
        os.makedirs(folder, exist_ok=True)
        stack.enter_context(_write_lock(folder, wait=True))
        temporary = tempfile.mkdtemp(prefix=_PARTIAL, dir=folder)
        try:
            known = save(os.path.join(temporary, _PREFIX)) or {}
            # The Saver's own index of checkpoints names absolute paths, wrong after the renaming.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(temporary, "checkpoint"))
            files = {name: known[name] if name in known else entry_of(os.path.join(temporary, name))
                     for name in sorted(os.listdir(temporary))}
            manifest = {"format": FORMAT, "version": VERSION, "step": step, "graph_hash": graph_hash,
                        "next_loss": next_loss if next_loss is None or math.isfinite(next_loss) else None,
                        "order": order, "files": files}
            if microbatches is not None:
                manifest["microbatches"] = microbatches
            if recompute is not None:
                manifest["recompute"] = list(recompute)
            manifest["sha256"] = _own_hash(manifest)
            write_atomically(os.path.join(temporary, MANIFEST), json.dumps(manifest, indent=2) + "\n")
            os.chmod(temporary, 0o755)
            _to_disk(temporary)
            os.rename(temporary, place)
            _to_disk(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _remove_old(folder, spared)


def _remove_old(folder: str, spared: int | None) -> None:
    """Removes all checkpoints but the last ones, and one that is spared."""
    for old in checkpoint_steps(folder)[KEPT:]:
        if old != spared:
            _remove(folder, f"step-{old}")


def entry_of(path: str) -> FileEntry:
    """Brings a file to the disk, and reads it: its size and hash."""
    _to_disk(path)
    return {"bytes": os.path.getsize(path), "sha256": _sha256(path)}


def find_checkpoint(run_folder: str) -> CheckpointInfo:
    """Finds the last whole checkpoint of an earlier run, without TensorFlow, and removes what a kill left half written.

    A damaged one is passed over, with a line on stderr, where there is a whole one before it.

    Raises:
      FormatError: there is none, or none that is whole; names the file and what is wrong with it.
    """
    folder = os.path.join(run_folder, "checkpoint")
    if os.path.basename(folder) not in names_in(run_folder):
        raise FormatError(f"--resume={run_folder}: holds no checkpoint; name the output directory of a run that lived "
                          "to write one (--checkpoint_every)")
    _clean(folder, alone=False)
    places = [(os.path.join(folder, f"step-{step}"), step) for step in checkpoint_steps(folder)]
    if not places and os.path.exists(os.path.join(folder, MANIFEST)):
        return _checked(folder, None)  # of version 1
    damages = []
    for place, step in places:
        try:
            found = _checked(place, step)
        except _LaterVersionError:
            raise  # it is whole: a run that went on from an earlier one would remove it with its first step
        except FormatError as error:
            if not os.path.isdir(place) and checkpoint_steps(folder)[:1] > [places[0][1]]:
                return find_checkpoint(run_folder)  # a run that writes there has removed it, and has later ones
            damages.append(error)
            continue
        for damage in damages:
            print(f"warning: {damage}; going on from step {found.step}", file=sys.stderr)
        return found
    if damages:
        raise FormatError(f"{damages[0]}; there is no whole checkpoint in {folder}, start anew")
    raise FormatError(f"--resume={run_folder}: holds no checkpoint; the run was ended before its first was written, "
                      "start anew")


def forget_half_written(run_folder: str) -> None:
    """Removes what a run that was killed has left of a checkpoint, or of another file, that it was writing."""
    with contextlib.suppress(FileNotFoundError):
        remove_partial(run_folder)
        _clean(os.path.join(run_folder, "checkpoint"), alone=True)


def forget_checkpoints_after(folder: str, step: int) -> None:
    """Removes the checkpoints of later steps, where a run goes on in its folder from an earlier one."""
    for later in checkpoint_steps(folder):
        if later > step:
            _remove(folder, f"step-{later}")


def restore(info: CheckpointInfo, load: Callable[[str], object]) -> None:
    """Restores variables.

    Args:
      info: what `find_checkpoint` found.
      load: reads the variables from files with the prefix it is given.

    Raises:
      FormatError: the files are damaged, or hold other variables.
    """
    from pase_mtf.compat import tf  # here, as a checkpoint is found and checked before TensorFlow is loaded
    if not os.path.isdir(info.folder):
        raise FormatError(f"{info.folder}: is not there any more: a run that writes there keeps the last {KEPT} only; "
                          "resume again, or once that run has ended")
    try:
        load(info.prefix)
    except (tf.errors.DataLossError, tf.errors.OutOfRangeError) as error:
        raise FormatError(f"{info.folder}: damaged ({summarize_error(error)}); resume from another") from error
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
        raise FormatError(f"{info.folder}: holds the variables of another program ({summarize_error(error)}); "
                          "resume with the model it was made with") from error


def _checked(folder: str, named: int | None) -> CheckpointInfo:
    """The checkpoint in a folder, all of it compared with its manifest.

    Args:
      folder: of this one checkpoint.
      named: the step in the folder's name; None: a checkpoint of version 1.

    Raises:
      FormatError: names the file and what is wrong with it.
    """
    path = os.path.join(folder, MANIFEST)
    manifest = read_json(path, FORMAT, sys.maxsize)
    if manifest["version"] > VERSION:
        told = f"{path}: {FORMAT} version {manifest['version']}, this program reads up to {VERSION}; upgrade pase_mtf"
        raise (_LaterVersionError if manifest.get("sha256") == _own_hash(manifest) else FormatError)(told)
    check_schema(path, manifest, _Manifest)
    step: int = manifest["step"]
    if not 0 <= step <= MAX_STEP:
        raise FormatError(f"{path}: step {str(step)[:24]}, it has to be 0 to {MAX_STEP}; it was changed")
    if manifest["version"] > 1 and manifest.get("sha256") != _own_hash(manifest):
        raise FormatError(f"{path}: contents do not match their own SHA-256; it was damaged or changed")
    if named is not None and step != named:
        raise FormatError(f"{path}: is of step {step}, its folder says {named}; it was moved or changed")
    for name, entry in manifest["files"].items():
        _check_file(os.path.join(folder, name), entry if isinstance(entry, dict) else {"bytes": entry})
    return CheckpointInfo(folder, step, manifest["graph_hash"], manifest.get("next_loss"), manifest.get("order", 1),
                          manifest.get("microbatches"), manifest.get("recompute"))


def _check_file(file: str, entry: Mapping[str, object]) -> None:
    found = os.path.getsize(file) if os.path.isfile(file) else None
    if found is None:
        raise FormatError(f"{file}: is missing, the checkpoint is not whole")
    if found != entry.get("bytes"):
        raise FormatError(f"{file}: has {found} bytes of {entry.get('bytes')}, it is truncated or changed")
    try:
        damaged = "sha256" in entry and _sha256(file) != entry["sha256"]
    except OSError as error:
        raise FormatError(f"{file}: cannot be read ({error.strerror})") from error
    if damaged:
        raise FormatError(f"{file}: its SHA-256 is not the one of {MANIFEST}, it was damaged or changed")


def _own_hash(manifest: Mapping[str, object]) -> str:
    """SHA-256 of a manifest without its own."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _to_disk(path: str) -> None:
    """Brings a file, or the names in a folder, to the disk: a rename must not overtake what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: str, name: str) -> None:
    """Removes a checkpoint: renamed first, so that a half of it is never taken for one."""
    gone = os.path.join(folder, f"{_PARTIAL}{name}")
    with contextlib.suppress(OSError):
        os.rename(os.path.join(folder, name), gone)
        shutil.rmtree(gone, ignore_errors=True)


def _clean(folder: str, *, alone: bool) -> None:
    """Removes what a killed run left half written; nothing while somebody writes.

    Args:
      folder: of checkpoints.
      alone: whether nobody can be writing there, also where that is told by no lock.
    """
    if not any(name.startswith((_PARTIAL, _LOCK)) for name in names_in(folder)):
        return
    with contextlib.suppress(OSError, filelock.Timeout), _write_lock(folder, wait=False) as is_held:
        if not (is_held or alone):
            return
        for name in os.listdir(folder):
            if name.startswith(_PARTIAL):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


@contextlib.contextmanager
def _write_lock(folder: str, *, wait: bool) -> Iterator[bool]:
    """Held while a checkpoint is written; the system takes it from a process that dies.

    Yields:
      whether it is: where nothing can be locked the block is entered all the same.

    Raises:
      filelock.Timeout: somebody else holds it, and `wait` is false.
      OSError: see `take_lock`.
    """
    path = os.path.join(folder, _LOCK)
    is_ours = wait or not os.path.lexists(path)  # else its file is of whoever writes there
    lock = filelock.FileLock(path, timeout=-1 if wait else 0)
    is_held = take_lock(lock)
    try:
        yield is_held
    finally:
        if is_held or is_ours:
            with contextlib.suppress(OSError):
                os.unlink(path)
        lock.release()


@contextlib.contextmanager
def _removed_where_empty(folder: str) -> Iterator[None]:
    """A folder without a checkpoint is none: it goes where the first could not be written."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


@contextlib.contextmanager
def _as_usage_errors(place: str) -> Iterator[None]:
    """A disk that is full, or not ours to write to, in one line; TensorFlow reports it in errors of its own."""
    from pase_mtf.compat import tf  # as in `restore`
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {place}: {error.strerror}; free space or choose another place") from error
    except tf.errors.OpError as error:  # of any class: a file that grows too large is OutOfRange, a stale one Aborted
        raise UsageError(f"cannot write {place}: {summarize_error(error)}; free space or choose another "
                         "place") from error
