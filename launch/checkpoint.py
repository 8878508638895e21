"""checkpoint/: the master variables of the trained arm, whole or not there at all.

Masters do not depend on the strategy, so a training can be resumed on another mesh, or under another strategy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from pase_mtf.errors import FormatError, UsageError
from pase_mtf.files import read_json, write_atomically
from pase_mtf.launch.console import summarize_error

__all__ = ["CheckpointInfo", "find_checkpoint", "restore", "save_checkpoint"]

FORMAT = "pase_mtf.checkpoint"
VERSION = 1
_MANIFEST = "checkpoint.json"
_PREFIX = "model"


class CheckpointInfo:
    """A checkpoint that was checked: complete and ours.

    Attributes:
      prefix: what tf.train.Saver restores from.
      step: training steps done.
      graph_hash: of the program whose variables it holds.
    """

    def __init__(self, folder: str, manifest: dict[str, Any]):
        self.folder = folder
        self.prefix = os.path.join(folder, _PREFIX)
        self.step: int = manifest["step"]
        self.graph_hash: str = manifest["graph_hash"]


def save_checkpoint(folder: str, save: Callable[[str], object], *, step: int, graph_hash: str) -> None:
    """Writes a checkpoint beside `folder`, then renames it into place.

    Args:
      folder: must not exist.
      save: writes the variables to files with the prefix it is given.
      step: training steps done.
      graph_hash: of the program.

    Raises:
      UsageError: it cannot be written (disk full, no permission).
    """
    temporary = None
    try:
        with _as_usage_errors(folder):
            temporary = tempfile.mkdtemp(prefix=".checkpoint.", dir=os.path.dirname(folder) or ".")
            save(os.path.join(temporary, _PREFIX))
            # The Saver's own index of checkpoints names absolute paths, wrong after the renaming.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(temporary, "checkpoint"))
            files = {name: os.path.getsize(os.path.join(temporary, name)) for name in sorted(os.listdir(temporary))}
            manifest = {"format": FORMAT, "version": VERSION, "step": step, "graph_hash": graph_hash, "files": files}
            write_atomically(os.path.join(temporary, _MANIFEST), json.dumps(manifest, indent=2) + "\n")
            os.chmod(temporary, 0o755)
            os.rename(temporary, folder)
    except BaseException:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def find_checkpoint(run_folder: str) -> CheckpointInfo:
    """Finds and checks the checkpoint of an earlier run, without TensorFlow.

    Raises:
      FormatError: there is none, or it is truncated or foreign.
    """
    folder = os.path.join(run_folder, "checkpoint")
    if not os.path.isdir(folder):
        raise FormatError(f"--resume={run_folder}: holds no checkpoint; name the output directory of a finished run")
    path = os.path.join(folder, _MANIFEST)
    manifest = read_json(path, FORMAT, VERSION)
    files = manifest.get("files")
    if (not isinstance(files, dict) or not isinstance(manifest.get("step"), int)
            or not isinstance(manifest.get("graph_hash"), str)):
        raise FormatError(f"{path}: not a complete checkpoint; it is truncated or foreign")
    for name, size in files.items():
        file = os.path.join(folder, name)
        found = os.path.getsize(file) if os.path.isfile(file) else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes of {size}"
            raise FormatError(f"{file}: {state}; the checkpoint is truncated, resume from another")
    return CheckpointInfo(folder, manifest)


def restore(info: CheckpointInfo, load: Callable[[str], object]) -> None:
    """Restores variables.

    Args:
      info: what `find_checkpoint` found.
      load: reads the variables from files with the prefix it is given.

    Raises:
      FormatError: the files are damaged, or hold other variables.
    """
    from pase_mtf.compat import tf  # here, as a checkpoint is found and checked before TensorFlow is loaded
    try:
        load(info.prefix)
    except (tf.errors.DataLossError, tf.errors.OutOfRangeError) as error:
        raise FormatError(f"{info.folder}: damaged ({summarize_error(error)}); resume from another") from error
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
        raise FormatError(f"{info.folder}: holds the variables of another program ({summarize_error(error)}); "
                          "resume with the model it was made with") from error


@contextlib.contextmanager
def _as_usage_errors(place: str) -> Iterator[None]:
    """A disk that is full, or not ours to write to, in one line; TensorFlow reports it in errors of its own."""
    from pase_mtf.compat import tf  # as in `restore`
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {place}: {error.strerror}; free space or choose another place") from error
    except (tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError, tf.errors.UnknownError,
            tf.errors.InternalError, tf.errors.FailedPreconditionError, tf.errors.NotFoundError) as error:
        raise UsageError(f"cannot write {place}: {summarize_error(error)}; free space or choose another "
                         "place") from error
