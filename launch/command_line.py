"""The launcher's command line: its flags, and what it says to mistakes in them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from pase_mtf import models
from pase_mtf.errors import UsageError
from pase_mtf.exit_codes import HelpRequested
from pase_mtf.flag_text import read_words
from pase_mtf.launch.options import OPTIMIZERS, Options
from pase_mtf.launch.resumption import resumed
from pase_mtf.models.checks import DTYPES
from pase_mtf.pipeline.schedule import SCHEDULES

__all__ = ["parse_command_line", "read_flags", "shared_flags"]

_OF_A_HOST = frozenset({"task", "cluster", "devices", "output_dir", "data", "resume", "log_every"})
"""Flags that may be others on every host of a run: which host it is; what launchers compare by what it came to (the
addresses, the kind of devices); folders and data, of which those of rank 0 count; what it alone prints."""
_FILES = ("preset", "strategy", "machine")
_FILE = "FILE"
"""What stands, where launchers compare them, for the path of a file: rank 0 alone reads it, and tells the others."""

_USAGE = """\
Finds the cheapest way to split every layer of a Mesh-TensorFlow model over the devices, trains with it, and shows the
measured speedup over data parallelism.

  python -m pase_mtf.launch --model=transformer --mesh=8

Exit codes: 0 done; 2 bad usage, a place that cannot be written, or a loss that is not finite; 3 no feasible strategy;
4 out of memory; 5 the strategy does not fit the graph; 6 the losses of the arms disagree; 7 a process of --cluster is
missing, was lost, or was started with other flags; 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP) and 141 (nobody reads the
output) interrupted: what was measured so far is written.
"""


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
    text("preset", 'Its sizes: a preset of configs/models/*.json, or a file such as {"preset": "tiny", "batch": 32}; '
         "default: tiny on virtual CPU devices, small on GPUs.")
    text("mesh", "A number of devices, or a mesh shape such as 'rows:2;cols:4': that many devices, and an expert "
         "strategy of two axes lies on exactly these; the search is free to use others.")
    text("devices", "auto (GPUs where there are enough, else virtual CPU devices), cpu, gpu, or a list of TensorFlow "
         "device names separated by commas.")
    number("batch", "Examples per step; default: the preset's.")
    number("steps", "Measured training steps.")
    number("warmup", "Training steps before those, not timed; the first of them is traced for its memory.")
    text("data", "Files to train on: an IDX image file or folder, a folder of images with labels, a text file, or "
         "source.txt,target.txt; default: synthetic data.")
    text("strategy", "search, data_parallel, expert, zero, pipeline, or a file of a strategy or pipeline: what is "
         "trained, kept and resumed.")
    text("compare", "The arms to measure beside it, separated by commas: data_parallel (through stock mtf.Lowering and "
         "through ours), expert, search, zero (with --sharded_updates: data parallelism in which every device updates "
         "a part of the weights), stock_data_parallel, pipeline (stages of layers on groups of devices), mcmc and "
         "mcmc_expert (FlexFlow's search from data parallelism and from the expert strategy), auto_mtf (Mesh-TF's own "
         "layout optimiser), random:N, changed:N (the searched strategy with some layers as in a random one), within:N "
         "(the fastest within N limits on memory), strategy files, or none.")
    text("machine", "Where the search's numbers come from: local (measured here, then cached), a name of "
         "configs/machines, or a file: of a machine, or of kernel times (python -m pase_mtf.calibration --save).")
    text("prices", "How the machine at hand is priced: measured (the kernels of the strategies themselves, timed when "
         "they are needed and kept; the default for CPUs of one process) or roofline (by its rates and links).")
    number("measure_seconds", "With measured prices: how long a run may measure kernels, for all its strategies; "
           "searches of later runs of the program take a thirtieth of it. Trial steps come on top: one turn of them in "
           "any case, and no further one once 15 % are over.")
    switch("trial", "With prices of the devices of the run: of the arms whose steps are predicted to take about as "
           "long as that of the search, a few steps of each decide which strategy the search takes.")
    switch("recalibrate", "Measure the machine at hand again, whatever is kept of it.")
    text("memory_limit", "What a strategy may hold per device: bytes, 11GB, 10.5GiB, device (what the machine says), "
         "or none.")
    text("microbatches", "In how many pieces a batch is computed, one after the other, with one update: less memory, "
         "the same losses. A number that divides the batch, or auto: that with which the fastest strategy within "
         "--memory_limit is fastest.")
    text("schedule", f"The order of a pipeline that is searched: {' or '.join(SCHEDULES)} (docs/pipelines.md).")
    text("recompute", "Which blocks of the model (layers of a transformer, ...) are computed once more in the backward "
         "pass, and not kept until then: none, all, names separated by commas, or auto: those with which the fastest "
         "strategy within --memory_limit is fastest.")
    switch("sharded_updates", "Make the update of every layer's weights a layer of its own: devices that hold the same "
           "weights may update a part each, and keep the optimizer's slots of that part alone.")
    text("optimizer", f"Mesh-TensorFlow's own: {', '.join(OPTIMIZERS)}; default: the preset's.")
    flags.DEFINE_float("learning_rate", None, "Default: the preset's, or for another optimizer " + ", ".join(
        f"{rate if rate else 'its own schedule'} ({name})" for name, rate in OPTIMIZERS.items()) + ".",
        flag_values=values)
    text("dtype", f"Of activations: {', '.join(DTYPES)}; default: the preset's. With bfloat16 variables and their "
         "updates stay float32.")
    text("output_dir", "Where the run's files go; must not exist, but to go on there (--resume); default "
         "outputs/<model>-<mesh>-<time>-<process>.")
    switch("search_only", "Find and print the strategy and write its files; train nothing.")
    text("resume", "Output directory of an earlier run: continue its training. Or auto: begin in --output_dir, or go "
         "on there from the last checkpoint, to the step where this command ends a run that it begins.")
    number("seed", "Of initial values, synthetic data, dropout, and strategies that are drawn.")
    switch("print_config", "Print the resolved configuration as JSON and exit.")
    number("log_every", "Print a line every so many steps.")
    switch("checkpoint", "Write checkpoint/, every now and then and at the end.")
    number("checkpoint_every", "Write a checkpoint every so many steps; default: every five minutes. The last two are "
           "kept.")
    text("cluster", "Over which processes the devices of --mesh are spread: local:4 (four on this computer), slurm, "
         "tf_config, or host1:port,host2:port (docs/cluster.md); default: this one.")
    text("clients", "With --cluster: one (the first process builds the graph of all devices, and feeds it) or ranks "
         "(every process builds that of its own devices, reads its own rows of the data, and runs in step with the "
         "others).")
    number("task", "With a --cluster that lists its hosts: which of them this command is started on, 0 for the first.")
    number("max_restarts", "With --cluster: how often the run is started again, from its last checkpoint, after a "
           "process was lost.")
    flags.DEFINE_boolean("help", False, "Show this.", short_name="h", flag_values=values)
    return values


def read_flags(values: flags.FlagValues, program: str, usage: str, arguments: Sequence[str]) -> None:
    """Sets flags, "help" among them, by a command line.

    Args:
      values: the flags.
      program: its name.
      usage: what --help says before it lists the flags.
      arguments: without the program's name.

    Raises:
      UsageError: of `read_words`; or a leftover word.
      HelpRequested: --help; holds the text.
    """
    rest = read_words(values, [program, *arguments])
    if values["help"].value:
        raise HelpRequested(f"{usage}\nFlags:{values.get_help()}")
    if rest:
        raise UsageError(f"{rest[0]!r} is no flag; write --name=value (--help lists the flags)")


def parse_command_line(arguments: Sequence[str], *, complete: bool = False) -> Options:
    """Reads the flags.

    Args:
      arguments: without the program's name.
      complete: whether these are all options of a run (`Options.to_arguments`): what is left out is None, whatever the
        run that it continues was started with.

    Raises:
      UsageError: of `read_flags`; or a value that cannot be meant.
      HelpRequested: --help; holds the text.
    """
    values = _read(arguments)
    given = {field.name for field in dataclasses.fields(Options)} if complete else {
        name for name in values if values[name].present}
    options = resumed(_chosen(values), given)
    options.check()
    return options


def shared_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """The flags that have to be the same in the commands of all hosts of a run, and their values.

    Values that mean the same are the same: a mesh of one axis and its number of devices, arms in another order, and
    files wherever they lie. They are what the command says, and nothing that it takes from a run that it continues: a
    host that is there again after a fault may find another state of that run than rank 0 has begun with.

    Args:
      arguments: without the program's name.

    Raises:
      UsageError: of `read_flags` and `parse_mesh`.
      HelpRequested: --help; holds the text.
    """
    options = _chosen(_read(arguments))
    mesh, arms = options.mesh_flag, {part.strip() for part in options.compare.split(",")}
    compared = arms - {"", "none", options.strategy}
    axes = mesh.axes if len(mesh.axes) > 1 else ()  # one axis says no more than how many devices it has
    alike = {"mesh": ";".join(f"{name}:{size}" for name, size in axes) or str(mesh.devices),
             "compare": ",".join(sorted(map(_without_path, compared))) or "none",
             **{name: _without_path(value) for name in _FILES if (value := getattr(options, name)) is not None}}
    return {name: value for name, value in {**options.to_json(), **alike}.items() if name not in _OF_A_HOST}


def _without_path(value: str) -> str:
    """The value of a flag, of whatever host, that takes a name or the path of a file."""
    return _FILE if value.endswith(".json") or os.sep in value else value


def _read(arguments: Sequence[str]) -> flags.FlagValues:
    values = _flag_values()
    read_flags(values, "pase_mtf.launch", _USAGE, arguments)
    return values


def _chosen(values: flags.FlagValues) -> Options:
    chosen: dict[str, Any] = {field.name: values[field.name].value for field in dataclasses.fields(Options)}
    for name in (*_FILES, "output_dir", "resume"):
        if chosen[name] is not None:
            chosen[name] = os.path.expanduser(chosen[name])  # which no shell does behind "="; a folder "~" is a trap
    chosen["compare"] = ",".join(os.path.expanduser(part.strip()) for part in chosen["compare"].split(","))
    return Options(**chosen)
