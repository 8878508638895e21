"""The command line: absl flags to `Options`, with one line for every mistake."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from pase_mtf import models
from pase_mtf.errors import UsageError
from pase_mtf.launch.options import OPTIMIZERS, Options

__all__ = ["HelpRequested", "parse_command_line"]

_USAGE = """\
Finds the cheapest way to split every layer of a Mesh-TensorFlow model over the devices, trains with it, and shows the
measured speedup over data parallelism.

  python -m pase_mtf.launch --model=transformer --mesh=8

Exit codes: 0 done; 2 bad usage; 3 no feasible strategy; 4 out of memory; 5 the strategy does not fit the graph;
6 the losses of the arms disagree; 130 interrupted (what was measured so far is written).
"""


class HelpRequested(Exception):  # noqa: N818 - not an error
    """--help was given; the text is the message."""


def _flag_values() -> flags.FlagValues:
    """Own flags, apart from absl's global ones, so that tests and programs can parse as often as they like."""
    values = flags.FlagValues()
    default = Options()

    def text(name: str, help_text: str) -> None:
        flags.DEFINE_string(name, getattr(default, name), help_text, flag_values=values)

    def number(name: str, help_text: str) -> None:
        flags.DEFINE_integer(name, getattr(default, name), help_text, flag_values=values)

    def switch(name: str, help_text: str) -> None:
        flags.DEFINE_boolean(name, getattr(default, name), help_text, flag_values=values)

    text("model", f"The model: {', '.join(models.names())}.")
    text("preset", "Its sizes (configs/models/*.json); default: tiny on virtual CPU devices, small on GPUs.")
    text("mesh", "A number of devices, or a mesh shape such as 'rows:2;cols:4': that many devices, and the expert "
         "strategy lays the model out on exactly these axes; the search is free to use others.")
    text("devices", "auto (GPUs where there are enough, else virtual CPU devices), cpu, gpu, or a list of TensorFlow "
         "device names separated by commas.")
    number("batch", "Examples per step; default: the preset's.")
    number("steps", "Measured training steps.")
    number("warmup", "Training steps before those, not timed; the first of them is traced for its memory.")
    text("data", "Files to train on: an IDX image file or folder, a folder of images with labels, a text file, or "
         "source.txt,target.txt; default: synthetic data.")
    text("strategy", "search, data_parallel, expert, or a strategy file: what is trained, kept and resumed.")
    text("compare", "The arms to measure beside it, separated by commas: data_parallel (through stock mtf.Lowering and "
         "through ours), expert, search, stock_data_parallel, mcmc and mcmc_expert (FlexFlow's search from data "
         "parallelism and from the expert strategy), auto_mtf (Mesh-TF's own layout optimiser), random:N, "
         "changed:N (the searched strategy with some layers as in a random one), strategy files, or none.")
    text("machine", "Where the search's numbers come from: local (measured here, then cached), a name of "
         "configs/machines, or a file.")
    text("optimizer", f"Mesh-TensorFlow's own: {', '.join(OPTIMIZERS)}; default: the preset's.")
    flags.DEFINE_float("learning_rate", None, "Default: the preset's, or for another optimizer " + ", ".join(
        f"{rate if rate else 'its own schedule'} ({name})" for name, rate in OPTIMIZERS.items()) + ".",
        flag_values=values)
    text("output_dir", "Where the run's files go; must not exist; default outputs/<model>-<mesh>-<time>.")
    switch("search_only", "Find and print the strategy and write its files; train nothing.")
    text("resume", "Output directory of an earlier run: continue its training.")
    number("seed", "Of initial values, synthetic data, dropout, and strategies that are drawn.")
    switch("print_config", "Print the resolved configuration as JSON and exit.")
    number("log_every", "Print a line every so many steps.")
    switch("checkpoint", "Write checkpoint/ at the end.")
    flags.DEFINE_boolean("help", False, "Show this.", short_name="h", flag_values=values)
    return values


def parse_command_line(arguments: Sequence[str]) -> Options:
    """Reads the flags.

    Args:
      arguments: without the program's name.

    Raises:
      UsageError: an unknown flag, a value that does not parse, a leftover word, or a value that cannot be meant.
      HelpRequested: --help; holds the text.
    """
    values = _flag_values()
    try:
        rest = values(["pase_mtf.launch", *arguments])[1:]
    except flags.Error as error:
        raise UsageError(" ".join(str(error).split()) + "; --help lists the flags") from error
    if values["help"].value:
        raise HelpRequested(f"{_USAGE}\nFlags:{values.get_help()}")
    if rest:
        raise UsageError(f"{rest[0]!r} is no flag; write --name=value (--help lists the flags)")
    given = {name for name in values if values[name].present}
    names = Options.__dataclass_fields__
    options = Options(**{name: values[name].value for name in names}).resumed(given)
    options.check()
    return options


