"""The page of benchmarks/epochs.py: curves as they were measured, and what they come to with predicted step times."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import markdown
from benchmarks.facts import facts_text, of_rows
from benchmarks.paper_numbers import PAL
from pase_mtf.epochs.curve import EpochCurve, Run
from pase_mtf.epochs.projection import Projection, Ratio, project_training
from pase_mtf.epochs.report import HEAD, epochs_text, projection_rows, range_text, ratio_text, spread_text
from pase_mtf.epochs.step_times import StepTimes
from pase_mtf.errors import DataError
from pase_mtf.launch.epochs.measure import VERSION

__all__ = ["CURVES", "MIXES", "PLACES", "curve_of", "curves_of", "document", "free_of_scaling", "is_earlier",
           "projection_of", "settings_of"]

CURVES = {"alexnet": "AlexNet on Fashion-MNIST", "transformer": "the transformer on translated messages",
          "biglstm": "BigLSTM on German messages"}
"""The models whose epochs are measured -> what they are."""
_STANDS_FOR = {"inception_v3": "alexnet", "gnmt": "transformer", "biglstm": "biglstm"}
PLACES = (1, 8)
"""How many workers the smallest batch of a curve stands for: large models have larger batches that still pay."""
_DEVICES = tuple(2 ** power for power in range(10))
_WAYS = (1, 2, 4, 8)
MIXES = tuple((devices // ways, ways) for devices in _DEVICES for ways in _WAYS if ways <= devices)
"""(workers, ways) whose steps are predicted."""


def settings_of(path: pathlib.Path) -> dict[str, Any]:
    """The settings of the runs of a CSV, which stand in its first line.

    Raises:
      DataError: they do not.
    """
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.loads(file.readline().removeprefix("#"))
        if not isinstance(settings, dict):
            raise ValueError(settings)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: its first line tells no settings of `python -m pase_mtf.epochs measure`; give a file "
                        "that this command wrote") from error
    return settings


def is_earlier(settings: Mapping[str, Any]) -> bool:
    """Whether runs were measured with an earlier order of examples: they are shown, and joined by none of today."""
    return settings.get("version", VERSION) < VERSION


def curves_of(paths: Mapping[str, pathlib.Path], before: Mapping[str, Any], here: Mapping[str, str]) -> dict[str, Any]:
    """Model -> what its CSV says: the settings of its runs, and the runs; and the `facts` of where it was measured.

    Args:
      paths: model -> CSV.
      before: the same of an earlier time: curves that are as they were keep their facts.
      here: the facts of those that are not.

    Raises:
      DataError: one cannot be read.
    """
    found = {}
    for name, path in paths.items():
        runs = [[run.batch, run.seed, run.epochs, int(run.reached)] for run in EpochCurve.load(path).runs]
        curve = {"settings": settings_of(path), "runs": runs}
        same = curve.items() <= before.get(name, {}).items()
        found[name] = {**curve, "facts": before[name]["facts"] if same else here}
    return found


def curve_of(results: Mapping[str, Any], model: str) -> EpochCurve:
    """A measured curve."""
    return EpochCurve(tuple(Run(batch, epochs, bool(reached), seed) for batch, seed, epochs, reached
                            in results["curves"][model]["runs"]), CURVES[model])


def free_of_scaling(steps: StepTimes) -> StepTimes:
    """The same where any number of workers costs no more than one (SE_N = 1)."""
    return StepTimes(steps.worker_batch, {(workers, ways): steps.seconds[1, ways] for workers, ways in steps.seconds},
                     f"{steps.source}, workers cost each other nothing")


def projection_of(results: Mapping[str, Any], row: Mapping[str, Any], place: int, *, free: bool = False) -> Projection:
    """What a row of predicted steps comes to.

    Args:
      results: with the curves.
      row: of one model on one machine.
      place: how many workers the smallest batch of the curve stands for.
      free: workers cost each other nothing.
    """
    curve = curve_of(results, _STANDS_FOR[row["model"]])
    steps = StepTimes(row["worker_batch"], {(workers, ways): seconds for workers, ways, seconds in row["seconds"]},
                      f"predicted for {row['machine']}")
    return project_training(curve.scaled(place * row["worker_batch"] / curve.batches[0]),
                            free_of_scaling(steps) if free else steps, _DEVICES, _WAYS)


def _curve_table(results: Mapping[str, Any], model: str) -> str:
    curve, rows = curve_of(results, model), []
    first = curve.at(curve.batches[0])
    for batch in curve.batches:
        epochs, mine = curve.at(batch), [run for run in curve.runs if run.batch == batch]
        assert epochs is not None
        assert first is not None
        rows.append([batch, epochs_text(epochs), range_text(epochs), f"{epochs.median / first.median:.2f}",
                     f"{epochs.median / batch * curve.batches[0] / first.median:.3f}",
                     f"{sum(run.reached for run in mine)} of {len(mine)}"])
    return markdown.table(["batch", "epochs, median", "spread", "times the epochs of the smallest",
                           "times its steps", "runs that reached it"], rows)


def _settings_text(results: Mapping[str, Any], model: str) -> str:
    found, facts = (results["curves"][model][part] for part in ("settings", "facts"))
    sizes = found["sizes"]
    return (f"{found['data']}; sizes in `{sizes['preset']}`. {found['examples']:,} examples are an epoch; ten to "
            f"twenty times in each, or after every step where there are fewer, the loss of {found['held_out']} others "
            f"is looked at, and a run ends when it is at most {found['target']:g} nats. {sizes['optimizer']}, learning "
            f"rate {found['rate']:g} at batch {found['rate_batch']}, times the square root of the batch beside it "
            f"(`--rule={found['rule']}`), rising from 0 over {found['warmup']:g} epochs; at most {found['cap']:g} "
            f"epochs. A batch above {found['piece']} is pieces of that size, whose gradients are summed. Measured on "
            f"{_facts_text(facts)}.")


def _facts_text(facts: Mapping[str, str]) -> str:
    return f"{facts['machine']}; {facts['versions']}; commit {facts['commit']}"


def _scale_row(results: Mapping[str, Any], row: Mapping[str, Any], place: int) -> list[str]:
    priced, free = (projection_of(results, row, place, free=each) for each in (False, True))
    known = [point for point in priced.points if point.gain is not None]
    cells = [row["model"], row["machine"] + ("" if row["fits"] else " (does not fit)"), str(place),
             str(priced.hybrid_from or "none"), str(known[-1].devices), _gain_text(known[-1].gain)]
    alone, best = priced.best_alone, priced.best_of_all
    cells += [f"{alone.devices}{' (end)' if priced.alone_still_gains else ''}" if alone else "",
              f"{best.best.workers} x {best.best.ways}" if best and best.best else ""]
    cells += [_gain_text(projection.gain_at_scale) for projection in (priced, free)]
    return [*cells, f"{PAL[row['model']]:.3f}"]


def _as_much(case: tuple[str, Projection]) -> bool:
    """Whether hybrid is ahead by what the paper says of a model, on the most devices that are known."""
    model, projection = case
    return [point.gain.value >= PAL[model] for point in projection.points if point.gain is not None][-1]


def _ahead_from(cases: Sequence[tuple[str, Projection]]) -> str:
    """From how many devices on hybrid is ahead."""
    known = sorted({projection.hybrid_from for _, projection in cases if projection.hybrid_from})
    return " to ".join(map(str, dict.fromkeys((known[0], known[-1])))) if known else "no number of"


def _gain_text(gain: Ratio | None) -> str:
    if gain is None:
        return ""
    spread = spread_text(gain)
    return ratio_text(gain) + (f" ({spread})" if spread else "")


def _scale_table(results: Mapping[str, Any]) -> str:
    head = ["model", "machine", "smallest batch is of, workers", "hybrid ahead from, devices", "most devices",
            "ahead on these", "alone best on", "best mix", "times as fast", "the same with SE_N = 1",
            "Pal et al., at least"]
    return markdown.table(head, [_scale_row(results, row, place) for row in results["steps"] for place in PLACES],
                          left=(0, 1))


def _speedups(row: Mapping[str, Any]) -> list[str]:
    known = {(workers, ways): seconds for workers, ways, seconds in row["seconds"]}
    one = known[1, 1]
    return [row["model"], row["machine"], str(row["worker_batch"]), f"{1e3 * one:.1f}",
            *(f"{one / known[1, ways]:.2f}" for ways in _WAYS[1:]),
            *(f"{one / known[workers, 1]:.2f}" if (workers, 1) in known else "" for workers in (8, 64, 256))]


def document(results: Mapping[str, Any]) -> str:
    """The page.

    Args:
      results: `facts` (of the predictions), `curves` (of `curves_of`), and `steps`: rows of
        `model`, `machine`, `worker_batch`, `fits` (one device holds it) and `seconds`, triples of workers, ways and
        seconds.
    """
    found = {place: [(row["model"], projection_of(results, row, place)) for row in results["steps"]]
             for place in PLACES}
    cases = [case for of_place in found.values() for case in of_place]
    parts = [
        "# Time to a trained model",
        f"Steps predicted on {facts_text(of_rows(results['steps'], results['facts']) or [results['facts']])}. "
        "Reproduce with `python -m benchmarks.epochs`. The "
        "curves as `python -m pase_mtf.epochs project --curve=` reads them: "
        + ", ".join(f"[epochs-{name}.csv](epochs-{name}.csv)" for name in CURVES) + ".",
        _INTRODUCTION, "## Epochs by global batch\n\n![](epochs.svg)"]
    if earlier := [title for name, title in CURVES.items() if is_earlier(results["curves"][name]["settings"])]:
        parts.append(_EARLIER.format(", ".join(earlier)))
    for name, title in CURVES.items():
        parts += [f"### {title[:1].upper()}{title[1:]}", _settings_text(results, name), _curve_table(results, name)]
    parts += ["## Steps", _STEPS,
              markdown.table(["model", "machine", "examples to a worker", "ms on one", "SU_2", "SU_4", "SU_8", "SE_8",
                              "SE_64", "SE_256"], [_speedups(row) for row in results["steps"]], left=(0, 1)),
              "## At scale, beside Pal et al.", _SCALE, _scale_table(results), "## What differs",
              _DIFFERS.format(as_much=sum(map(_as_much, cases)), rows=len(cases)),
              _DIFFERENCES.format(*(_ahead_from(found[place]) for place in PLACES))]
    for row in results["steps"]:
        if row["machine"] == results["steps"][0]["machine"]:
            projection = projection_of(results, row, PLACES[0])
            parts += [f"## {row['model']} on {row['machine']}\n\n![](epochs-{row['model']}.svg)",
                      markdown.table(HEAD, projection_rows(projection), left=(1,))]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = (
    "A step that is N times as large takes fewer steps of an epoch and, from some batch on, more epochs to the same "
    "loss. So the time to a trained model is seconds of a step x steps of an epoch x epochs (Pal et al., *Optimizing "
    "Multi-GPU Parallelization Strategies for Deep Learning Training*, IEEE Micro 2019, arXiv 1907.13257), and on many "
    "devices it can be better to give every worker several of them, by a strategy of M devices, and to keep the batch.")
_EARLIER = (
    "Measured with an earlier order of examples: {}. In it the orders of different seeds were alike, and all seeds "
    "began with the initial values of seed 0. So a spread of zero, or a small one, may be due to that, and be larger "
    "by the order of today; no runs were added to these curves since.")
_STEPS = (
    "Predicted, preset `big`: the cheapest strategy of M devices at the batch of a worker, repeated by every worker, "
    "priced on the whole machine with the all-reduces of all workers' gradients. SU_M is how many times as fast a "
    "worker's step is on M devices; SE_N how much of a step's speed N workers of one device keep. All-reduces are "
    "priced as if nothing hid them.")
_SCALE = (
    "The epochs are those of the small models: AlexNet's for inception_v3, the transformer's for gnmt, the small "
    "BigLSTM's for biglstm. Their batches are small, too, so the curve is placed by workers: its smallest batch "
    "is that of so many workers of the large model. \"Most devices\" are those up to which the curve tells data "
    "parallelism alone, \"ahead on these\" compares the best mix with it there. \"Alone best on\" is the number of "
    "devices on which data parallelism alone is done first (\"end\": the last of the curve, more might do better), "
    "\"best mix\" what is done first on up to 512 devices, and \"times as fast\" how much sooner. In parentheses the "
    "worst and the best of the seeds. With SE_N = 1 workers cost each other nothing, and only epochs limit them.")
_DIFFERS = (
    "The shape is the paper's: data parallelism alone gains until the epochs grow as fast as the batch, from there on "
    "only a faster step helps. On the most devices that the curves tell, hybrid is ahead by at least as much as the "
    "paper says in {as_much} of {rows} rows. What differs, and in which direction:")
_DIFFERENCES = (
    "- **Epochs.** The paper's are of the published models at their published quality and stand in a picture; "
    "ours are of narrow models, to a loss that the smallest batch reaches in one or two epochs, and they grow "
    "from a few times the smallest batch on. So hybrid is ahead from {} devices on where that batch is that of "
    "one worker, and from {} where it is that of eight. One base rate and a rule for it: rates tuned for "
    "every batch would grow the epochs less.\n"
    "- **Strategies of a worker.** The paper splits the graph of a model over the devices of a worker. Ours are "
    "searched among all splits of all layers, and may split the batch of the worker, too; so SU_M is larger, "
    "and so is what hybrid gains. Workers of up to eight devices are tried.\n"
    "- **Steps.** Ours are predicted sums in which nothing hides the all-reduces. That holds data parallelism "
    "back, of inception_v3 and biglstm above all; but it holds hybrid back as well, whose steps are shorter and "
    "move the same gradients: with SE_N = 1 hybrid gains more, not less.\n"
    "- **At scale.** \"Times as fast\" lets both take the devices that suit them, hybrid up to eight times as "
    "many; \"ahead on these\" is on equal numbers. Where data parallelism alone still gains at the end of its "
    "curve (\"end\"), the first is too high.\n"
    "- **Resolution.** Held-out examples are looked at ten to twenty times an epoch, so seeds that differ by less "
    "show no spread. A batch with fewer runs than the others says so in its last column.")
