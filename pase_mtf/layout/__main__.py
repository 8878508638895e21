"""The command line of `layout`: python -m pase_mtf.layout --graph=my_project.train:build_graph --mesh=8."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from absl import flags

from pase_mtf.amounts import parse_bytes
from pase_mtf.calibration.load import are_measured, is_kernel_file
from pase_mtf.errors import UsageError, nearest
from pase_mtf.exit_codes import HelpRequested, exit_code_of
from pase_mtf.files import check_outputs, write_atomically
from pase_mtf.flag_text import check_not_empty, read_words
from pase_mtf.interrupts import Interrupts
from pase_mtf.layout.formats import FORMATS
from pase_mtf.layout.named import named_function

if TYPE_CHECKING:
    from pase_mtf.layout.layout import Layout

__all__ = ["main"]

_FLAGS = flags.FlagValues()
_MOST_ALTERNATIVES = 1000
_INTERRUPTED = "interrupted; set --time_limit to get the best layout so far"
_SMALLER = "take fewer devices (--mesh), or fix some dims (--fix)"


def _define() -> None:
    flags.DEFINE_string("graph", None, "module:function (or path/to/file.py:function) that builds the program and "
                        "returns an mtf.Graph or (graph, outputs)", flag_values=_FLAGS)
    flags.DEFINE_string("mesh", None, "number of devices", flag_values=_FLAGS)
    flags.DEFINE_string("mesh_shape", None, "only this mesh shape, such as rows:2;cols:4", flag_values=_FLAGS)
    flags.DEFINE_multi_string("compare", [], "a layout to cost too: mesh shape and layout rules in one string, such "
                              "as rows:2;cols:4;batch:rows (may be repeated)", flag_values=_FLAGS)
    flags.DEFINE_multi_string("fix", [], "dim:axis for a dim whose axis is given, dim: for one that stays whole, "
                              "dim=other for two that are to share an axis (may be repeated)", flag_values=_FLAGS)
    flags.DEFINE_string("machine", "local", "whose numbers count: a name, a file (also of kernel times), or local "
                        "(measured)", flag_values=_FLAGS)
    flags.DEFINE_string("prices", None, "roofline (by the rates of the machine; the default, also of local) or "
                        "measured (the kernels of the layouts themselves, timed here; or told by a file of kernel "
                        "times that --machine names, whose default it is)", flag_values=_FLAGS)
    flags.DEFINE_string("measure_seconds", "60", "with measured prices, how long to lower and to measure",
                        flag_values=_FLAGS)
    flags.DEFINE_string("memory_limit", "device", "what a layout may need per device: bytes, 11GB, 10.5GiB, "
                        "device (what one of the machine holds) or none", flag_values=_FLAGS)
    flags.DEFINE_string("time_limit", None, "seconds after which the best layout so far is the answer, with its gap",
                        flag_values=_FLAGS)
    flags.DEFINE_string("format", "flags", f"what to print: {', '.join(FORMATS)}", flag_values=_FLAGS)
    flags.DEFINE_string("output", None, "write to this file instead of the standard output", flag_values=_FLAGS)
    flags.DEFINE_bool("overwrite", False, "replace the output file if it exists", flag_values=_FLAGS)
    flags.DEFINE_integer("alternatives", 3, "how many of the next best layouts to show", flag_values=_FLAGS)
    flags.DEFINE_multi_string("explain", [], "a dim: show what each axis would cost for it (may be repeated)",
                              flag_values=_FLAGS)


_define()


def _fixed(entries: Sequence[str]) -> tuple[dict[str, str | None], list[tuple[str, str]]]:
    """What --fix says: dim name -> axis name, None for a dim that stays whole; and pairs of dims that share an axis."""
    fixed: dict[str, str | None] = {}
    together: list[tuple[str, str]] = []
    for entry in entries:
        for part in entry.replace(",", ";").split(";"):
            one, equals, other = (word.strip() for word in part.partition("="))
            if equals and one and other and one != other and not set(":=") & set(one + other):
                together.append((one, other))
                continue
            dim, colon, axis = (word.strip() for word in part.partition(":"))
            if not colon or not dim or ":" in axis:
                raise UsageError(f"--fix={entry}: {part!r} is not dim:axis; write it as in --fix=batch:rows, or "
                                 "--fix=nx=nx_block for two dims on one axis")
            if fixed.setdefault(dim, axis or None) != (axis or None):
                raise UsageError(f"--fix={entry}: {dim} is fixed twice, to {fixed[dim] or 'no axis'} and to "
                                 f"{axis or 'no axis'}; a dim has one axis")
    return fixed, together


def _files_of(graph: str) -> list[str]:
    """The files that --graph may name: the path itself, or those of a module, wherever Python looks for it."""
    place = graph.rpartition(":")[0]
    module = place.replace(".", os.sep)
    return [place, *(os.path.join(folder, module + end) for folder in ("", *sys.path)
                     for end in (".py", f"{os.sep}__init__.py"))]


_Number = TypeVar("_Number", int, float)


def _number(flag: str, text: str | None, kind: Callable[[str], _Number]) -> _Number | None:
    if text is None:
        return None
    try:
        number = kind(text)
    except ValueError as error:
        raise UsageError(f"--{flag}={text}: not a number; give one") from error
    if not number > 0:
        raise UsageError(f"--{flag}={text}: not above zero; give a positive number")
    return number


def _run(arguments: Sequence[str]) -> Layout:
    """Finds the layout, of the program with these arguments of its own."""
    if _FLAGS.format not in FORMATS:
        raise UsageError(f"--format={_FLAGS.format}: unknown; {nearest(_FLAGS.format, FORMATS)}")
    check_not_empty("--mesh_shape", _FLAGS.mesh_shape, "give one, such as rows:2;cols:4")
    check_not_empty("--machine", _FLAGS.machine, "name one or a file")
    devices = _number("mesh", _FLAGS.mesh, int)
    if devices is None and _FLAGS.mesh_shape is None:
        raise UsageError("--mesh is missing; say how many devices: --mesh=8")
    time_limit = _number("time_limit", _FLAGS.time_limit, float)
    measure_seconds = _number("measure_seconds", _FLAGS.measure_seconds, float)
    if are_measured(_FLAGS.prices, _FLAGS.machine, "--prices") and _FLAGS.explain:
        instead = ("take a machine with rates, such as local or h100" if is_kernel_file(_FLAGS.machine) else
                   "leave out --prices=measured")
        raise UsageError(f"--explain is for roofline prices; leave it out, or {instead}")
    parse_bytes(_FLAGS.memory_limit)  # before the program is built
    check_outputs({"--output": _FLAGS.output},
                  [*(("--graph", file) for file in _files_of(_FLAGS.graph or "")), ("--machine", _FLAGS.machine)],
                  may_replace=lambda path: _FLAGS.overwrite, otherwise=", or add --overwrite")
    fixed, together = _fixed(_FLAGS.fix)
    if not 0 <= _FLAGS.alternatives <= _MOST_ALTERNATIVES:
        raise UsageError(f"--alternatives={_FLAGS.alternatives}: give a number from 0 to {_MOST_ALTERNATIVES}")
    build_graph = named_function(_FLAGS.graph, arguments)
    # Here and not above: it brings TensorFlow, which --help and a mistyped flag should not have to wait for.
    from pase_mtf.layout.find import find_layout
    return find_layout(build_graph, devices, machine=_FLAGS.machine, mesh_shape=_FLAGS.mesh_shape,
                       memory_limit=_FLAGS.memory_limit, fixed=fixed, together=together, compare=_FLAGS.compare,
                       alternatives=_FLAGS.alternatives, name=_FLAGS.graph,
                       time_limit=time_limit, prices=_FLAGS.prices, measure_seconds=measure_seconds or 60.0,
                       explain=_FLAGS.explain)


def _answer(argv: Sequence[str]) -> int:
    """What the command does, as `main` tells."""
    _FLAGS.unparse_flags()  # whatever this process was asked before
    end = argv.index("--") if "--" in argv else len(argv)
    if any(argument in ("--help", "-help", "-h") for argument in argv[1:end]):
        raise HelpRequested(f"{__doc__}\n\n{_FLAGS.get_help()}")
    if rest := read_words(_FLAGS, argv[:end]):
        raise UsageError(f"unexpected argument {rest[0]!r}; flags begin with --, and the program's own arguments "
                         "follow a -- by itself")
    for name in ("graph", "machine", "output"):
        if (given := _FLAGS[name].value) is not None:
            _FLAGS[name].value = os.path.expanduser(given)  # which no shell does behind "="
    # What the program prints while it builds its graph is not the answer.
    with contextlib.redirect_stdout(sys.stderr):
        found = _run(argv[end + 1:])
    text = found.format(_FLAGS.format)
    try:
        if _FLAGS.output is not None:
            write_atomically(_FLAGS.output, text)
            text = ""
    finally:  # what was found is there though it cannot be written
        print(found, file=sys.stderr)
        sys.stdout.write(text)
    for dim in _FLAGS.explain:
        print("\n" + found.explain(dim), file=sys.stderr)
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    The layout goes to the standard output, and nothing else does: what the program's own code prints goes to the
    standard error, as do tables and notes.
    """
    with Interrupts(at_once=False) as interrupts:
        return exit_code_of(lambda: _answer(argv), interrupts, interrupted=_INTERRUPTED, smaller=_SMALLER)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
