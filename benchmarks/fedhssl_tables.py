"""Tables and plot of benchmarks/fedhssl.py."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t

Line = dict[str, Any]

ORDER = ("boosting", "fedsplitnn", "fedcvt", "fedlocalssl", "fedcssl", "fedgssl", "fedhssl")
ALGORITHMS = (None, "simsiam", "byol", "moco")


def print_tables(lines: Sequence[Line]) -> None:
    """Print one Markdown table a set and share of aligned rows."""
    plain = [line for line in lines if line.get("updates") is None]
    for name in dict.fromkeys(line["set"] for line in plain):
        own = [line for line in plain if line["set"] == name]
        for share in sorted({line["aligned"] for line in own if line.get("aligned")}):
            _print_table(name, share, [li for li in own if li.get("aligned") in (None, share)])
    _print_updates([line for line in lines if line.get("updates") is not None])


def _print_table(name: str, share: float, lines: list[Line]) -> None:
    columns = sorted({line["labelled"] for line in lines if line.get("aligned") == share})
    metric = lines[0]["metric"]
    print(f"\n**{name}**, {share:.0%} aligned, {metric}:\n")
    print("| method | " + " | ".join(f"{number} labels" for number in columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    seeds = len({line["seed"] for line in lines})
    base = {(li["seed"], li["labelled"]): li["value"] for li in lines if is_base(li)}
    for method in ORDER:
        for algorithm in ALGORITHMS:
            own = [
                li for li in lines
                if li["method"] == method and li.get("algorithm") == algorithm
            ]  # fmt: skip
            if own:
                cells = [
                    _cell([li for li in own if li["labelled"] == n], base, seeds=seeds)
                    for n in columns
                ]
                label = f"{method}, {algorithm}" if algorithm else method
                print(f"| {label} | " + " | ".join(cells) + " |")


def is_base(line: Line) -> bool:
    return line["method"] == "fedsplitnn"


def _cell(lines: list[Line], base: dict[tuple[int, int], float], *, seeds: int) -> str:
    if not lines:
        return ""
    values = [line["value"] for line in lines]
    text = f"{statistics.mean(values):.3f} ± {_deviation(values):.3f}"
    if len(values) < seeds:
        text += f", n={len(values)}"
    cells = [(line["seed"], line["labelled"]) for line in lines]
    gains = [
        line["value"] - base[cell] for line, cell in zip(lines, cells, strict=True) if cell in base
    ]
    if len(gains) < 3 or is_base(lines[0]):
        return text
    mean, error = statistics.mean(gains), _deviation(gains) / math.sqrt(len(gains))
    if abs(mean) <= t.ppf(0.975, len(gains) - 1) * error:
        return text
    return text + (" (better)" if mean > 0 else " (worse)")


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _print_updates(lines: Sequence[Line]) -> None:
    if not lines:
        return
    first = lines[0]
    print(
        f"\n**{first['set']}**, {first['aligned']:.0%} aligned, {first['labelled']} labels, "
        f"{first['method']}, {first['algorithm']}, {first['metric']}:\n"
    )
    print(
        "| iterations | MB each way and secondary | e = 1 | e = 4 | e = 8 |\n| --- "
        + "| --- " * 4
        + "|"
    )
    seeds = len({line["seed"] for line in lines})
    for rounds in sorted({line["rounds"] for line in lines}):
        own = [line for line in lines if line["rounds"] == rounds]
        cells = [
            _cell([li for li in own if li["updates"] == e], {}, seeds=seeds) for e in (1, 4, 8)
        ]
        print(f"| {rounds} | {own[0]['megabytes']:.2f} | " + " | ".join(cells) + " |")


def plot(lines: Sequence[Line], out: Path) -> None:
    """Draw the metric against the number of labels, one panel a set, at its largest share."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fedhssl"
    from matplotlib import pyplot as plt

    plain = [line for line in lines if line.get("updates") is None]
    names = list(dict.fromkeys(line["set"] for line in plain))
    figure, axes = plt.subplots(1, len(names), figsize=(3.4 * len(names), 3.4), squeeze=False)
    styles = {
        "boosting": ("tab:gray", ":"),
        "fedsplitnn": ("black", "-"),
        "fedcvt": ("tab:olive", "-."),
        "fedlocalssl": ("tab:blue", "--"),
        "fedcssl": ("tab:green", "--"),
        "fedgssl": ("tab:orange", "--"),
        "fedhssl": ("tab:red", "-"),
    }
    for axis, name in zip(axes[0], names, strict=True):
        own = [line for line in plain if line["set"] == name]
        share = max(line["aligned"] for line in own if line.get("aligned"))
        for method, (colour, style) in styles.items():
            chosen = [
                li for li in own
                if li["method"] == method and li.get("aligned") in (None, share)
                and li.get("algorithm") in (None, "moco")
            ]  # fmt: skip
            numbers = sorted({li["labelled"] for li in chosen})
            values = [[li["value"] for li in chosen if li["labelled"] == n] for n in numbers]
            if not numbers:
                continue
            axis.errorbar(
                numbers,
                [statistics.mean(own) for own in values],
                yerr=[_deviation(own) for own in values],
                color=colour,
                linestyle=style,
                marker=".",
                capsize=2,
                label=method if chosen[0].get("algorithm") is None else f"{method} (MoCo)",
            )
        axis.set_xscale("log")
        axis.set_title(f"{name}, {share:.0%} aligned")
        axis.set_xlabel("labelled rows")
        axis.set_ylabel(own[0]["metric"])
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
