"""Writes docs/paper.md from what `benchmarks.paper` found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks import markdown
from benchmarks.paper_explanations import FIGURES, NETWORKS, SCALE, STRATEGIES
from benchmarks.paper_numbers import DEVICES, FIGURE_6, PAL, TABLE_1, TABLE_2
from benchmarks.paper_plot import ARMS

__all__ = ["document"]

_MARK = "†"
_LONGEST = 3
"""Names of layers that a cell lists; of more it says how many."""


def _search(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.2f}" if "seconds" in row else row["says"]


def _exact(row: dict[str, Any]) -> str:
    return f"{row['exact']:.4f}" + ("" if row["optimal"] else " (not proven)")


def _slower(found: dict[str, Any]) -> str:
    """Where pricing and search together take longer than the paper's PaSE."""
    cases = [(model, devices, by_devices[str(devices)], TABLE_1[model]["PaSE"][number])
             for model, by_devices in found.items() if model in TABLE_1 for number, devices in enumerate(DEVICES)]
    slower = [(model, devices, row) for model, devices, row, paper in cases if row["build"] + row["exact"] > paper]
    if not slower:
        return f"Network and search together are faster than the paper's PaSE in all {len(cases)} cases."
    names = ", ".join(f"{model} p = {devices}" for model, devices, _ in slower)
    return (f"Network and search together are slower than the paper's PaSE in {len(slower)} of {len(cases)} cases "
            f"({names}), where the search itself takes at most {1e3 * max(row['exact'] for *_, row in slower):.1f} ms: "
            "the rest is pricing.")


def _times(found: dict[str, Any]) -> str:
    rows = []
    for model, by_devices in found.items():
        paper = TABLE_1.get(model, {})
        for number, devices in enumerate(DEVICES):
            row = by_devices[str(devices)]
            theirs = [f"{paper[name][number]:g}" if name in paper else "–" for name in ("PaSE", "FlexFlow")]
            ours = row["build"] + row["exact"]
            times = f"{paper['PaSE'][number] / ours:.3g}" if "PaSE" in paper else "–"
            rows.append([model, str(devices), str(row["most"]), f"{row['build']:.3f}", _exact(row),
                         _search(row["pase"]), str(row["paper_space"]["most"]), _exact(row["paper_space"]),
                         _search(row["paper_space"]["pase"]), *theirs, times])
    parts = [
        "## Table I: seconds to find a strategy\n\nThe paper's cost model and constants (5000 FLOP a word). `exact` "
        "is the search alone with compiled code loaded; “network” is what pricing the graph takes, which is to be "
        "added to it; the last column is the paper's PaSE over that sum. `pase` is the paper's algorithm as we wrote "
        "it, the search alone in a process of its own, which begins by loading compiled code, a quarter of a second; a "
        "dynamic program whose tables would need more than 4 GB is not run, and says what it would need. “Paper's "
        "configurations”: parts per dim, in one order, on at most p devices, as in the paper; ours also tell the "
        "orders of the axes over the devices apart, and replication. K is the most configurations of a layer.\n\n"
        + markdown.table(["model", "p", "K", "network", "`exact`", "`pase`", "paper's configurations: K", "`exact`",
                         "`pase`", "PaSE, paper", "FlexFlow, paper", "times faster"], rows) + "\n\n" + _slower(found)]
    instances = [[model, devices, f"{row['instance']['cost']:.6g}", f"{row['cost']:.6g}",
                  _exact(row["instance"]), _search(row["instance"]["pase"]),
                  f"{TABLE_1[model]['PaSE'][DEVICES.index(int(devices))]:g}"]
                 for model, by_devices in found.items() for devices, row in by_devices.items() if "instance" in row]
    if instances:
        parts.append("### On the networks of the paper's own tool\n\nCost networks that the paper's tool made of its "
                     "own graphs (`tests/data/instances`), beside our graphs priced by the same formulas: the optimum "
                     "of either, in FLOP, and the searches on the tool's network.\n\n"
                     + markdown.table(["model", "p", "optimum, tool's network", "optimum, our graph", "`exact`",
                                      "`pase`", "PaSE, paper"], instances) + "\n\n" + NETWORKS)
    orders = [[model, *(str(by_devices[devices]["orders"][method]["layers"] or "–")
                        for devices in (next(iter(by_devices)), "32" if "32" in by_devices else next(iter(by_devices)))
                        for method in ("pase", "breadth_first"))] for model, by_devices in found.items()]
    least = next(iter(next(iter(found.values()))))
    parts.append("### How hard the graphs are for an elimination order\n\nThe most layers that one table of the "
                 "dynamic program spans, the layer that is taken among them: the paper's |D ∪ v|, at most 3 on its "
                 "Inception-v3 in the order of GenerateSeq. “–”: the network's normal form leaves nothing to decide "
                 "(layers of one configuration and single neighbours are folded in first).\n\n"
                 + markdown.table(["model", *(f"p = {devices}: {order}" for devices in (least, "32")
                                              for order in ("GenerateSeq", "breadth first"))], orders))
    return "\n\n".join(parts)


def _flop(cost: float) -> str:
    return "0" if cost == 0 else f"{cost / 1e9:+.3g}"


def _ours(groups: Sequence[Sequence[Any]]) -> str:
    return "; ".join(f"{splits} ({', '.join(names) if len(names) <= _LONGEST else f'{len(names)}×'})"
                     for splits, names in groups)


def _strategies(found: dict[str, Any]) -> str:
    worse = [model for model, row in found.items() if row["ours"] > row["theirs"] * (1 + 1e-9)]
    verdict = ("Ours never costs more than the paper's." if not worse else
               f"The paper's is cheaper than ours on {', '.join(worse)}.")
    proven = all(row["optimal"] for row in found.values())
    parts = [
        "## Table II: the strategies at p = 32\n\nOurs is the optimum of the paper's formulas and constants on our "
        f"graph{', proven' if proven else ', not always proven'}, over every configuration of up to four mesh axes, "
        "idle devices included, so that the paper's rows are among them. The paper's strategy gets the benefit of "
        "every doubt: the order of the axes over the devices, whether devices that a row leaves over idle or repeat "
        "the work, and the layers that its table does not name (normalisations, pools, concatenations, loss) are as "
        f"suits it best. {verdict} “Taking the paper's row” is what the cheapest strategy that has the paper's "
        "configuration in this row, and everything else free, costs more than ours, and which parts of the cost "
        "that is; 0: as good. All in 10⁹ FLOP."]
    for model, row in found.items():
        body = []
        for entry in row["rows"]:
            dims, splits = TABLE_2[model][entry["row"]]
            change = ", ".join(f"{part} {_flop(cost)}" for part, cost in entry["parts"].items()
                               if abs(cost) > 1e-4 * row["ours"])
            body.append([entry["row"], f"{dims}: ({splits})", _ours(entry["ours"]),
                         f"{entry['same']} of {entry['layers']}", _flop(entry["price"]), change or "–"])
        summary = [[name, *(f"{costs[part] / 1e9:.4g}" for part in costs if part != "resharding backward"),
                    f"{row[key] / 1e9:.6g}", f"{1e3 * row['seconds'][key]:.1f} ms"]
                   for name, key, costs in (("ours", "ours", row["ours_parts"]),
                                            ("the paper's", "theirs", row["theirs_parts"]))]
        heads = [part.removesuffix(" forward") for part in row["ours_parts"] if part != "resharding backward"]
        usual = ("The usual space (all devices, at most three axes) has the same optimum."
                 if math.isclose(row["usual"], row["ours"], rel_tol=1e-9) else
                 f"In the usual space (all devices, at most three axes) the optimum is {row['usual'] / 1e9:.6g}.")
        ratios = ", ".join(f"{ratio:.3f} at {float(word):g}" for word, ratio in row["ratios"].items())
        parts.append(
            f"### {model}\n\n"
            + markdown.table(["row", "the paper's", "ours", "layers alike", "taking the paper's row", "of which"],
                             body, range(4)) + "\n\n"
            + markdown.table(["strategy", *heads, "sum, 10⁹ FLOP", "our own model"], summary) + "\n\n"
            f"The paper's costs {row['theirs'] / row['ours']:.3f} times ours. {usual} At other prices of a word (in "
            f"FLOP): {ratios} times. The optimum of our own cost model takes {1e3 * row['seconds']['best']:.1f} ms."
            + ("\n\n" + STRATEGIES[model] if model in STRATEGIES else ""))
    return "\n\n".join(parts)


def _figures(found: dict[str, Any]) -> str:
    rows = []
    for model, machines in found.items():
        for machine, by_devices in machines.items():
            for number, devices in enumerate(DEVICES):
                row = by_devices[str(devices)]
                measured = FIGURE_6[machine].get(model, {})
                rows.append([model, machine, str(devices), _milliseconds(row, "data parallel"),
                             *(_speedup(row, arm) for arm, _ in ARMS),
                             *(f"{measured[name][number]:.2f}" if name in measured else "–"
                               for name in ("expert", "FlexFlow", "PaSE"))])
    pairs = _ordered(found)
    head = ("## Figure 6: speedup over data parallelism\n\nPredicted by our cost model (seconds, links from data "
            "sheets), beside what the paper measured. FlexFlow: its search (`mcmc`) on our costs, the better of its "
            f"two starts. {_MARK}: needs more memory on a device than the device has. "
            + _never_behind(machines for machines in found.values()) + f" {pairs}\n\n"
            "![1080 Ti](paper-1080ti.svg)\n![2080 Ti](paper-2080ti.svg)\n\n")
    return head + markdown.table(["model", "machine", "p", "data parallel", "expert", "FlexFlow", "ours",
                                 "expert, paper", "FlexFlow, paper", "PaSE, paper"], rows, range(2)) + _explained(found)


def _explained(found: dict[str, Any]) -> str:
    """What is to be said of the table, with its numbers; nothing where a model of the figure is not priced yet."""
    paper = FIGURE_6["1080ti"]
    if not paper.keys() <= found.keys():
        return ""

    def beside(model: str) -> list[tuple[dict[str, Any], float]]:
        """(ours, the paper's speedup) for every number of devices."""
        return [(found[model]["1080ti"][str(devices)], speedup)
                for devices, speedup in zip(DEVICES, paper[model]["PaSE"], strict=True)]

    inception, transformer = ([abs(row["ours"]["speedup"] - speedup) for row, speedup in beside(model)]
                              for model in ("inception_v3", "transformer"))
    *added, last = (f"{1e3 * (row['data parallel']['seconds'] - speedup * row['ours']['seconds']) / (speedup - 1):.0f}"
                    for row, speedup in beside("alexnet"))
    at_8 = DEVICES.index(8)
    return "\n\n" + FIGURES.format(
        inception=f"{max(inception):.2f}", transformer=f"{max(transformer[:-1]):.2f}", most=f"{transformer[-1]:.2f}",
        added=f"{', '.join(added)} and {last}", measured=f"{paper['transformer']['expert'][at_8]:.2f}",
        expert=f"{beside('transformer')[at_8][0]['expert']['speedup']:.2f}")


def _never_behind(machines: Any) -> str:
    """How often ours is behind another arm, and the most that it is ahead of the best other."""
    rows = [row for one in machines for by_devices in one.values() for row in by_devices.values()]
    behind = sum(row["ours"]["seconds"] > min(_others(row)) * (1 + 1e-9) for row in rows)
    proven = sum(row["optimal"] for row in rows)
    ahead = max(min(_others(row)) / row["ours"]["seconds"] for row in rows)
    return (f"Of {len(rows)} cases ours is behind another strategy in {behind}, proven optimal in {proven}, and at "
            f"most {ahead:.2f} times as fast as the best of the others.")


def _others(row: dict[str, Any]) -> list[float]:
    return [row[name]["seconds"] for name in ("data parallel", "expert", "FlexFlow") if name in row]


def _ordered(found: dict[str, Any]) -> str:
    """Of the pairs of arms that the paper measured apart, how many the prediction orders as they were."""
    right = total = 0
    for model, machines in FIGURE_6["1080ti"].items():
        for number, devices in enumerate(DEVICES):
            row = found.get(model, {}).get("1080ti", {}).get(str(devices))
            if row is None:
                continue
            arms = [("data parallel", 1.0), *((ours, machines[theirs][number]) for ours, theirs in (
                ("expert", "expert"), ("FlexFlow", "FlexFlow"), ("ours", "PaSE")) if theirs in machines)]
            for index, (one, first) in enumerate(arms):
                for other, second in arms[:index]:
                    if abs(first - second) > 0.02 and one in row and other in row:
                        total += 1
                        right += (first > second) == (row[one]["speedup"] > row[other]["speedup"])
    return (f"Of {total} pairs of strategies on the 1080 Ti that the paper measured more than 0.02 apart, the "
            f"prediction orders {right} as measured.") if total else ""


def _scale(found: dict[str, Any]) -> str:
    rows = [[model, devices, *(_milliseconds(row, name) for name in ("data parallel", "ours")),
             *(_speedup(row, arm) for arm, _ in ARMS), "yes" if row["optimal"] else "no"]
            for model, machines in found.items() for devices, row in machines["h100"].items()]
    return ("## At scale, predicted\n\nNodes of eight H100, 1024 examples a step; speedups over data parallelism. "
            + _never_behind(found.values()) + "\n\n![H100](paper-h100.svg)\n\n"
            + markdown.table(["model", "p", "data parallel", "ours", "expert", "FlexFlow", "ours, times", "proven"],
                             rows)
            + "\n\n" + SCALE)


def _workers(found: dict[str, Any], scale: dict[str, Any]) -> str:
    rows = []
    for model, by_devices in found.items():
        ahead = [machine["ours"]["speedup"] for machine in scale.get(model, {}).get("h100", {}).values()]
        rows.append([model, *(f"{row['speedup']:.2f}" for devices, row in by_devices.items() if devices != "1"),
                     *(f"{max(0.0, int(devices) / row['speedup'] - 1):.0%}" for devices, row in by_devices.items()
                       if devices != "1"),
                     f"{PAL[model] - 1:.1%}", f"{min(ahead) - 1:.0%} to {max(ahead) - 1:.0%}" if ahead else "–"])
    sizes = [devices for devices in next(iter(found.values())) if devices != "1"]
    return ("## Hybrid parallelism (Pal et al., IEEE Micro 2019)\n\nWith M devices to a worker, the step of one "
            "worker (the paper's batch, one H100 against M of a node, our strategy) is SU_M times as fast. Hybrid "
            "parallelism is ahead of data parallelism alone once SU_M > M · (SE_MN/SE_N) · (E_N/E_MN): at equal "
            "scaling efficiency, once M times the global batch needs more than M/SU_M − 1 more epochs, given beside "
            "it. How the epochs grow with the batch is a matter of training: small models were, to a loss "
            "([`epochs.md`](benchmarks/epochs.md)), the published ones were not. "
            "The last columns are their projection, at least so far ahead of data parallelism at scale, and how far "
            "ours is ahead of data parallelism at p = 128 to 1024 by the table above: the same global batch for both, "
            "so that the epochs are equal, which theirs are not.\n\n"
            + markdown.table(["model", *(f"SU_{size}" for size in sizes), *(f"epochs, M = {size}" for size in sizes),
                             "Pal et al.", "ours at scale"], rows))


def _speedup(row: dict[str, Any], arm: str) -> str:
    return f"{row[arm]['speedup']:.2f}{'' if row[arm].get('fits', True) else _MARK}" if arm in row else "–"


def _milliseconds(row: dict[str, Any], arm: str) -> str:
    if arm not in row:
        return "–"
    return f"{1e3 * row[arm]['seconds']:.2f} ms{'' if row[arm].get('fits', True) else _MARK}"


def _timed(results: dict[str, Any]) -> str:
    """Where Table I was timed; of several computers, which models on which."""
    models: dict[str, list[str]] = {}
    for model in results.get("times") or [""]:
        facts = results.get("timed", {}).get(model, results["facts"])
        models.setdefault(f"{facts['processor']}; Python {facts['python']}, numpy {facts.get('numpy', '?')}, "
                          f"numba {facts.get('numba', '?')}", []).append(model)
    return " / ".join(where + (f" ({', '.join(of_it)})" if len(models) > 1 else "")
                      for where, of_it in models.items())


def document(results: dict[str, Any]) -> str:
    """docs/paper.md, of the sections there are."""
    parts = ["# The papers' tables, beside ours\n\nElango, *PaSE: Parallelization Strategies for Efficient DNN "
             "Training*, IPDPS 2021 (arXiv 2407.04001), and Pal et al., *Optimizing Multi-GPU Parallelization "
             "Strategies for Deep Learning Training*, IEEE Micro 2019 (arXiv 1907.13257). Reproduce with "
             "`python -m benchmarks.paper`; all numbers are in [`paper.json`](paper.json). All models in the "
             "published sizes; batch 128 for the networks of convolutions, 64 for the others. "
             f"Table I was timed on {_timed(results)}; all else is computed, by the prices of commit "
             f"{', '.join(dict.fromkeys(results.get('commits', {}).values())) or 'unknown'}, and the same everywhere."]
    writers = {"times": _times, "strategies": _strategies, "speedups": _figures, "scale": _scale,
               "workers": lambda found: _workers(found, results.get("scale", {}))}
    parts += [write(results[name]) for name, write in writers.items() if name in results]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"
