"""Functions that build a graph, named on a command line: module:function, or path/to/file.py:function."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

from absl import flags

from pase_mtf.errors import PaseError, UsageError, nearest, shortened

__all__ = ["named_function"]


def named_function(text: str | None, arguments: Sequence[str] = ()) -> Callable[..., object]:
    """The function that --graph names; what it raises is one line.

    Args:
      text: module:function, or path/to/file.py:function.
      arguments: of the program's own command line, which is all that it sees of one; flags of absl that it defines are
        read from there.

    Raises:
      UsageError: there is none, or its module cannot be imported.
    """
    if not text:
        raise UsageError("--graph is missing; name a function: --graph=my_project.train:build_graph")
    return _reporting(_load(text, arguments), text, arguments)


@contextlib.contextmanager
def _by_itself(text: str, arguments: Sequence[str]) -> Iterator[None]:
    """Shows a program the command line that it would have if it were run by itself."""
    kept, sys.argv = sys.argv, [text.rpartition(":")[0], *arguments]
    try:
        yield
    finally:
        sys.argv = kept


def _parse_flags() -> None:
    """Reads the program's flags, as absl's app.run would have done; those that have to be there may be missing, and
    flags of absl's own mean something else to a program that has another parser.

    Raises:
      UsageError: a flag that the program defines has no such value.
    """
    if flags.FLAGS.is_parsed():
        return
    try:
        flags.FLAGS(sys.argv, known_only=True)
    except flags.Error as error:
        named = re.search(r"flag -{1,2}([^=:\s]+)", str(error))
        module = flags.FLAGS.find_module_defining_flag(named[1]) if named else None
        if not flags.FLAGS.is_parsed() and module and not module.startswith("absl."):
            raise UsageError(f"the program's own arguments: {shortened(error, 200)}; correct what follows the --"
                             ) from error
        flags.FLAGS.mark_as_parsed()


def _load(text: str, arguments: Sequence[str]) -> Callable[..., object]:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"--graph={text}: not module:function; write it as in my_project.train:build_graph")
    if place.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(place))
        if not os.path.isfile(place):
            raise UsageError(f"--graph={text}: no file {place}; check the path")
        sys.path.insert(0, folder)
        place = file.removesuffix(".py")
        if "." in place:
            raise UsageError(f"--graph={text}: Python imports no file with a dot in its name; rename {file}")
        if not _is_found_at(place, os.path.join(folder, file)):
            raise UsageError(f"--graph={text}: another module is called {place}; rename {file}")
    elif os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if importlib.util.find_spec(place.partition(".")[0]):  # what is not there is said at once
            importlib.import_module("pase_mtf.compat")  # sets TensorFlow up, which the program may import first
        with _by_itself(text, arguments):
            found: object = importlib.import_module(place)
            _parse_flags()
    except PaseError:
        raise
    except (Exception, SystemExit) as error:  # a script without a guard may parse its flags, and leave
        if isinstance(error, ModuleNotFoundError) and error.name and (place + ".").startswith(error.name + "."):
            raise UsageError(f"--graph={text}: no module {error.name!r}; run it in the folder that holds it, or set "
                             "PYTHONPATH") from error
        raise UsageError(f"--graph={text}: importing {place} failed: {type(error).__name__}: "
                         f"{shortened(error, 300)}; import it by itself to see more") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"--graph={text}: {place} has no {part!r}: "
                             f"{nearest(part, [n for n in dir(found) if not n.startswith('_')])}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"--graph={text}: {name} is no function; name one that builds the graph")
    return found


def _is_found_at(name: str, path: str) -> bool:
    """Whether a module was loaded from a file, or would be: a package of the name beside it goes first."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        if spec is None:  # the import will say so
            return True
        file = spec.origin
    return file is not None and os.path.exists(file) and os.path.samefile(file, path)


def _reporting(build_graph: Callable[..., object], named: str, arguments: Sequence[str]) -> Callable[..., object]:
    """The function, with what it raises in one line."""
    @functools.wraps(build_graph)
    def build(*args: object, **kwargs: object) -> object:
        try:
            with _by_itself(named, arguments):
                return build_graph(*args, **kwargs)
        except PaseError:
            raise
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            raise UsageError(f"--graph={named} failed: {type(error).__name__}: {text} ({where.filename}, line "
                             f"{where.lineno}); call it by itself to see more") from error
    return build
