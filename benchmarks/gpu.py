"""What data sheets tell of a GPU, beside its clock: the kernels of a device under many strategies of every model.

    python -m benchmarks.gpu --kernels=kernels.json        # here: 5 minutes of a core
    python benchmarks/gpu_clock.py kernels.json --output=times.json    # on a computer with that GPU and PyTorch
    python -m benchmarks.gpu --kernels=kernels.json --times=times.json --machine=h100 --save=measured.json

What a device computes in a step is told three times: by the rooflines of the data sheet, by those that are fitted to
the clock (`gpu_fit`; to that of all other models), and as the sum of its kernels' times on the GPU. Writes
docs/benchmarks/gpu.json and gpu.md, a section per GPU, and, with --save=, the machine file of what was fitted.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from tqdm import tqdm

from benchmarks import markdown
from benchmarks.commands import told_in_one_line
from benchmarks.facts import facts, facts_text, of_rows
from benchmarks.gpu_fit import counted, fitted, held_out, kind_of, rooflines
from benchmarks.search import FOLDER
from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import FormatError, InfeasibleError, UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.files import write_atomically
from pase_mtf.launch.arms.program import build_program
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.lowering.kernels import GraphKernels
from pase_mtf.machine.kernels import Kernel
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.experts import data_parallel, expert
from pase_mtf.strategy.find import find_strategy

__all__ = ["document", "main", "strategies", "summary"]

_PRESET = "big"
_SEEDS = (1, 2, 3)
_BY_HAND = {"data parallel": data_parallel, "expert": expert}


def strategies(model: str, dtype: str, devices: int,
               machine: Machine) -> Iterator[tuple[dict[str, Any], Mapping[Kernel, int]]]:
    """Strategies of a model's preset `big`: what the search finds, what people write by hand, in float32 random ones.

    Args:
      model: of the registry.
      dtype: of its activations.
      devices: p.
      machine: whose prices are asked.

    Yields:
      "model", "dtype", "strategy", and how often a device runs which kernels in a step.
    """
    config = models.load_config(model, _PRESET, dtype=dtype)
    with tf.Graph().as_default():
        program = build_program(models.get(model), config, config.batch, config.optimizer, config.learning_rate, 0)
        graph = export_graph(program.graph, name=model)
        source = GraphKernels(program.graph, graph)
        chosen = {"search": find_strategy(graph, devices, machine, memory_limit=None).configurations}
        for name, write in _BY_HAND.items():
            try:
                chosen[name] = write(graph, devices)
            except InfeasibleError:
                continue
        seeds = _SEEDS if dtype == "float32" else ()
        chosen |= {f"random {seed}": random_configurations(graph, devices, seed, seed) for seed in seeds}
        for name, configurations in chosen.items():
            counts: collections.Counter[Kernel] = collections.Counter()
            for number, configuration in enumerate(configurations):
                for kernels in source.layer(number, configuration).values():
                    counts.update(kernels)
            yield {"model": model, "dtype": dtype, "strategy": name}, counts


def summary(kernels: Sequence[Kernel], rows: Sequence[Mapping[str, Any]], seconds: np.ndarray,
            machine: Machine) -> dict[str, Any]:
    """What the clock says of strategies, of kinds of kernels, and of products by their size.

    Args:
      kernels: every one that some strategy runs.
      rows: of `strategies`, with "counts": number of a kernel -> how often.
      seconds: float64 [kernels], by the clock; nan: not timed, and left out everywhere.
      machine: whose rates are held against it.

    Returns:
      "strategies", "kinds", "products": rows of the page's tables.
    """
    sheet, others = rooflines(kernels, machine), held_out(kernels, seconds, rows, machine)
    known, kinds = ~np.isnan(seconds), np.array([kind_of(kernel) for kernel in kernels])
    clock, told = np.where(known, seconds, 0.0), []
    for row in rows:
        counts = counted([row], len(kernels)) * known
        if not counts.any():  # nothing that it runs was timed
            continue
        told.append({name: row[name] for name in ("model", "dtype", "strategy")} | {
            "measured": float(counts @ clock), "sheet": float(counts @ sheet),
            "others": float(counts @ others[row["model"]])})
    used = counted(rows, len(kernels)) * known
    flops = np.array([kernel.flops for kernel in kernels])
    sizes = np.floor(np.log10(np.maximum(flops, 1.0))).astype(int)
    products = []
    for kind in sorted(set(kinds) - {"pointwise"}):
        rate = machine.rates.get(kind) or machine.rates["convolution"]
        for size in sorted(set(sizes[(kinds == kind) & (used > 0)])):
            chosen = (kinds == kind) & (used > 0) & (sizes == size) & (clock > 0)
            reached = np.quantile(flops[chosen] / clock[chosen] / rate, (0.25, 0.5, 0.75, 1.0))
            products.append({"kind": str(kind), "from": 10.0 ** int(size), "kernels": int(chosen.sum()),
                             "reached": reached.tolist()})
    return {"strategies": told, "products": products,
            "kinds": [{"kind": str(kind), "kernels": int(((kinds == kind) & (used > 0)).sum()),
                       "sheet": float((used * sheet)[kinds == kind].sum()),
                       "measured": float((used * clock)[kinds == kind].sum())}
                      for kind in sorted(set(kinds[used > 0]))]}  # of others nothing was timed


def _models_table(rows: Sequence[Mapping[str, Any]]) -> str:
    by_model = collections.defaultdict[tuple[str, str], list[Mapping[str, Any]]](list)
    for row in rows:
        by_model[row["model"], row["dtype"]].append(row)
    table = []
    for (model, dtype), found in by_model.items():
        measured = np.array([row["measured"] for row in found])
        cells = [model, dtype, len(found), f"{1e3 * measured.min():.1f} to {1e3 * measured.max():.1f}"]
        for name in ("sheet", "others"):
            lines = np.array([row[name] for row in found])
            cells += [f"{(measured / lines).min():.2f} to {(measured / lines).max():.2f}",
                      f"{spearmanr(lines, measured).statistic:.2f}" if len(found) > len(_BY_HAND) + 1 else "-"]
        table.append(cells)
    return markdown.table(["model", "activations", "strategies", "ms by the clock", "clock ÷ data sheet",
                           "rank correlation", "clock ÷ fitted to the other models", "rank correlation"], table,
                          left=(0, 1))


def _section(found: Mapping[str, Any]) -> list[str]:
    clock = found["clock"]
    return [
        f"## {clock['gpu']}", "",
        f"PyTorch {clock['torch']}, CUDA {clock['cuda']}; the data sheet: machine {found['machine']}.", "",
        _models_table(found["strategies"]), "",
        "All strategies together, by kind of kernel:", "",
        markdown.table(["kind", "kernels", "data sheet, ms", "clock, ms", "clock ÷ data sheet"], [
            [row["kind"], f"{row['kernels']:,}", f"{1e3 * row['sheet']:.0f}", f"{1e3 * row['measured']:.0f}",
             f"{row['measured'] / row['sheet']:.2f}"] for row in found["kinds"]]), "",
        "What part of the data sheet's rate products and convolutions reach, by their size (quartiles, best):", "",
        markdown.table(["kind", "FLOP from", "kernels", "25 %", "median", "75 %", "best"], [
            [row["kind"], f"{row['from']:.0e}", f"{row['kernels']:,}",
             *(f"{100 * part:.1f} %" for part in row["reached"])] for row in found["products"]]), ""]


def document(results: Mapping[str, Any]) -> str:
    """The page of the results."""
    return "\n".join([
        "# Data sheets of GPUs beside their clocks", "",
        f"What a device computes in a step of presets `big` on {results['devices']} devices, as the sum of its",
        "kernels' times on one GPU, and by rooflines: of the data sheet, and of rates that were fitted to the",
        "clock, as those of the machines `h100_measured` and `h200_measured` are, but to all models besides the",
        "one at hand. Searched strategies, data parallel, the expert's and, in float32, three random ones.",
        "Nothing that moves between devices is in either, nor what starting a kernel takes, which machine files",
        "have apart (`overhead`); the clock's times have some 1.3 µs of it in every kernel. A kernel is what",
        "PyTorch has for the TensorFlow node. What is left above 1 is that, and bfloat16 that PyTorch adds and",
        "multiplies at half the bandwidth.", "",
        *(line for _, found in sorted(results["gpus"].items()) for line in _section(found)),
        f"Kernels written on: {facts_text(of_rows(results['gpus'].values(), results['facts']))}. Reproduce with",
        "`python -m benchmarks.gpu --kernels=kernels.json`, then where the GPU is (six minutes)",
        "`python benchmarks/gpu_clock.py kernels.json --output=times.json`, then `python -m benchmarks.gpu",
        "--kernels=kernels.json --times=times.json --machine=h100 --save=h100_measured.json`.", ""])


def _write_kernels(path: pathlib.Path, names: Sequence[str], devices: int, machine: Machine) -> None:
    """Every kernel that some strategy runs, those first that take longest by the data sheet."""
    for name in names:
        models.get(name)
    found = [entry for model in tqdm(names, unit="model") for dtype in ("float32", "bfloat16")
             for entry in strategies(model, dtype, devices, machine)]
    counts: collections.Counter[Kernel] = collections.Counter()
    for _, counted_here in found:
        counts.update(counted_here)
    lines = dict(zip(counts, rooflines([*counts], machine), strict=True))
    kernels = sorted(counts, key=lambda kernel: -counts[kernel] * lines[kernel])
    numbers = {kernel: number for number, kernel in enumerate(kernels)}
    rows = [row | {"counts": {numbers[kernel]: times for kernel, times in counts.items()}} for row, counts in found]
    write_atomically(path, json.dumps({
        "facts": facts(), "devices": devices, "rows": rows, "kernels": [kernel.to_json() for kernel in kernels]}))


def _read(path: str, *expected: str) -> dict[str, Any]:
    """A file that has these entries."""
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; python -m benchmarks.gpu --help tells what writes it"
                         ) from error
    except ValueError as error:
        raise FormatError(f"{path}: no JSON; python -m benchmarks.gpu --help tells what writes it") from error
    if not isinstance(data, dict) or not set(expected) <= set(data):
        raise FormatError(f"{path}: without {', '.join(expected)}; python -m benchmarks.gpu --help tells what writes "
                          "it")
    return data


def _measured(kernels: Sequence[Kernel], rows: Sequence[Mapping[str, Any]], seconds: np.ndarray, machine: Machine,
              clock: Mapping[str, Any], name: str) -> Machine:
    """The machine of the times, with where they come from."""
    return dataclasses.replace(fitted(kernels, seconds, counted(rows, len(kernels)), machine), name=name, source=(
        f"products, convolutions and bandwidth as fitted to the clock of one {clock['gpu']} (PyTorch {clock['torch']}, "
        f"{np.count_nonzero(~np.isnan(seconds))} kernels; docs/benchmarks/gpu.md); all else, links and overhead among "
        f"it, as of machine {machine.name}"))


@told_in_one_line()
def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the kernels, or what their times say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", required=True, help="written without --times, and read with it")
    parser.add_argument("--times", help="what benchmarks/gpu_clock.py has written of these kernels")
    parser.add_argument("--save", help="a file for the machine that is fitted to these times")
    parser.add_argument("--models", default=",".join(models.names()), help="of these (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--machine", default="h100", help="whose data sheet counts (default: %(default)s)")
    parser.add_argument("--output", default=str(FOLDER), help="folder of the results")
    flags = parser.parse_args(arguments)
    path, machine = pathlib.Path(flags.kernels), Machine.load(flags.machine)
    if not flags.times:
        _write_kernels(path, flags.models.split(","), flags.devices, machine)
        return 0
    data = _read(flags.kernels, "kernels", "rows", "devices")
    clock = _read(flags.times, "seconds", "gpu", "torch", "cuda")
    kernels = [Kernel.from_json(kernel) for kernel in data["kernels"]]
    if len(clock["seconds"]) > len(kernels):
        raise UsageError(f"{flags.times} has {len(clock['seconds'])} times, {flags.kernels} {len(kernels)} kernels; "
                         "give the file whose kernels were timed")
    seconds = np.full(len(kernels), np.nan)
    seconds[:len(clock["seconds"])] = np.array(clock["seconds"], dtype=float)  # None becomes nan
    if flags.save:
        _measured(kernels, data["rows"], seconds, machine, clock, pathlib.Path(flags.save).stem).save(flags.save)
    folder = pathlib.Path(flags.output)
    earlier = json.loads((folder / "gpu.json").read_text(encoding="utf-8")) if (folder / "gpu.json").exists() else {}
    if earlier and earlier["devices"] != data["devices"]:
        raise UsageError(f"{flags.kernels} is of {data['devices']} devices, {folder / 'gpu.json'} of "
                         f"{earlier['devices']}; choose another --output")
    known = {name: {"facts": earlier["facts"], **found} for name, found in earlier.get("gpus", {}).items()}
    results = {"facts": facts(), "devices": data["devices"], "gpus": known | {clock["gpu"]: {
        "facts": data.get("facts") or facts(),
        "machine": machine.name, "clock": {name: clock[name] for name in ("gpu", "torch", "cuda")},
        **summary(kernels, data["rows"], seconds, machine)}}}
    write_atomically(folder / "gpu.json", json.dumps(results, indent=1) + "\n")
    write_atomically(folder / "gpu.md", document(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
