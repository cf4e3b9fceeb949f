"""Tables and plot of research/fedhssl/fedhssl.py."""

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t

from research.common.panels import panels_of, save

Line = dict[str, Any]

ORDER = (
    "boosting", "fedsplitnn", "untrained", "fedlocalssl", "fedcssl", "fedgssl", "fedhssl",
)  # fmt: skip
ALGORITHMS = (None, "simsiam", "byol", "moco")

STEPS = (
    ("width alone", "untrained", "fedsplitnn"),
    ("local learning", "fedlocalssl", "fedsplitnn"),
    ("cross-party learning", "fedcssl", "fedsplitnn"),
    ("cross-party after local", "fedgssl", "fedlocalssl"),
    ("local after cross-party", "fedgssl", "fedcssl"),
    ("aggregation", "fedhssl", "fedgssl"),
    ("all of it", "fedhssl", "fedsplitnn"),
    ("all of it, at equal width", "fedhssl", "untrained"),
)
"""What a step gains: one method minus another."""


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
    mean = statistics.mean(gains)
    if abs(mean) <= _half_interval(gains):
        return text
    return text + (" (better)" if mean > 0 else " (worse)")


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


TEN_CLASSES = ("digits", "mfeat", "mfeat3", "mnist", "mnist20k")
"""Sets of digits, whose mean is taken seed by seed: one line that tells more than five."""


def print_gains(lines: Sequence[Line]) -> None:
    """Print what each step gains, in points, one table an algorithm, at the largest share."""
    plain = [line for line in lines if line.get("updates") is None]
    for algorithm in dict.fromkeys(li["algorithm"] for li in plain if li.get("algorithm")):
        print(f"\n**{algorithm}**, points with half of their 95 % interval:\n")
        print("| set | labels | " + " | ".join(step for step, *_ in STEPS) + " |")
        print("| --- | --- |" + " --- |" * len(STEPS))
        found: dict[tuple[str, int], list[dict[int, float]]] = {}
        for name in dict.fromkeys(line["set"] for line in plain):
            own = [line for line in plain if line["set"] == name]
            share = max((line["aligned"] for line in own if line.get("aligned")), default=None)
            own = [line for line in own if line.get("aligned") in (None, share)]
            for number in sorted({line["labelled"] for line in own}):
                found[name, number] = [
                    _gains(own, one, than, algorithm, number) for _, one, than in STEPS
                ]
        rows = [(name, number, steps) for (name, number), steps in found.items() if any(steps[1:])]
        pooled = [row for row in rows if row[0] in TEN_CLASSES]
        for number in sorted({number for _, number, _ in pooled}):
            own_steps = [steps for _, other, steps in pooled if other == number]
            if len(own_steps) > 1:
                of_step = [_mean_by_seed(gains) for gains in zip(*own_steps, strict=True)]
                rows.append((f"mean of {len(own_steps)} sets of digits", number, of_step))
        for name, number, steps in rows:
            cells = [with_interval(list(gains.values())) for gains in steps]
            if any(cells):
                print(f"| {name} | {number} | " + " | ".join(cells) + " |")


def _gains(
    lines: list[Line], method: str, than: str, algorithm: str, number: int
) -> dict[int, float]:
    """Return the points that one method has more than another, by seed."""
    one, other = (
        {
            li["seed"]: li["value"] for li in lines
            if li["method"] == name and li["labelled"] == number
            and li.get("algorithm") in (None, algorithm)
        }
        for name in (method, than)
    )  # fmt: skip
    return {seed: 100 * (one[seed] - other[seed]) for seed in sorted(one.keys() & other.keys())}


def _mean_by_seed(gains: Sequence[dict[int, float]]) -> dict[int, float]:
    seeds = sorted({seed for one in gains for seed in one})
    return {seed: statistics.mean(one[seed] for one in gains if seed in one) for seed in seeds}


def with_interval(gains: list[float]) -> str:
    """Return a mean and half of its 95 % interval; nothing of fewer than three."""
    if len(gains) < 3:
        return ""
    return f"{statistics.mean(gains):+.1f} ± {_half_interval(gains):.1f}"


def _half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % t interval of the mean."""
    return float(t.ppf(0.975, len(values) - 1)) * _deviation(values) / math.sqrt(len(values))


def print_measures(lines: Sequence[Line]) -> None:
    """Print accuracy, F1 and AUC of the first algorithm's methods, by set and number of labels."""
    print("| set | labels | method | accuracy | F1 | AUC |\n| --- |" + " --- |" * 5)
    plain = [line for line in lines if line.get("updates") is None and "f1" in line]
    cells = sorted({(line["set"], line["labelled"]) for line in plain})
    for (name, number), method in itertools.product(cells, ORDER):
        own = [
            li for li in plain
            if (li["set"], li["labelled"], li["method"]) == (name, number, method)
            and li.get("algorithm") in (None, "simsiam") and li.get("aligned") in (None, 0.4)
        ]  # fmt: skip
        if own:
            means = [
                statistics.mean(li[which] for li in own) for which in ("accuracy", "f1", "auc")
            ]
            row = " | ".join(f"{mean:.3f}" for mean in means)
            print(f"| {name} | {number} | {method} | {row} |")


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


def print_guidance(lines: Sequence[Line]) -> None:
    """Print [FedHSSL] Table V at the values of gamma that were measured: local encoders alone."""
    print("| set | loss | gamma | without the mean of tops | with it | points of the mean |")
    print("| --- |" + " --- |" * 5)
    for name, algorithm, gamma in sorted(
        {(li["set"], li["algorithm"], li["gamma"]) for li in lines if "gamma" in li}
    ):
        of = {"set": name, "algorithm": algorithm, "gamma": gamma}
        print(f"| {name} | {algorithm} | {gamma:g} | {_pair(lines, 'fedgssl', 'fedhssl', **of)} |")


def print_samples(lines: Sequence[Line]) -> None:
    """Print [FedHSSL] Table IX: local and cross-party learning by the share of rows."""
    print("| set | loss | share of rows | fedlocalssl | fedcssl | points of cross-party learning |")
    print("| --- |" + " --- |" * 5)
    for name, algorithm, share in sorted(
        {(li["set"], li["algorithm"], li["samples"]) for li in lines if "samples" in li}
    ):
        of = {"set": name, "algorithm": algorithm, "samples": share}
        cells = _pair(lines, "fedlocalssl", "fedcssl", **of)
        print(f"| {name} | {algorithm} | {share:.0%} | {cells} |")


def _pair(lines: Sequence[Line], one: str, other: str, **of: Any) -> str:
    """Return two methods' cells and the points between them, paired by seed."""
    found = [_by_seed(lines, method=method, **of) for method in (one, other)]
    texts = [f"{statistics.mean(v.values()):.3f} ± {_deviation([*v.values()]):.3f}" for v in found]
    gains = [100 * (found[1][seed] - found[0][seed]) for seed in found[0].keys() & found[1].keys()]
    return " | ".join([*texts, with_interval(gains)])


def _by_seed(lines: Sequence[Line], **of: Any) -> dict[int, float]:
    own = [line for line in lines if all(line.get(name) == value for name, value in of.items())]
    return {line["seed"]: line["value"] for line in own}


def plot_guidance(lines: Sequence[Line], out: Path) -> None:
    """Draw [FedHSSL] figure 8: SimSiam by gamma, one panel a set; bars are deviations."""
    own = [line for line in lines if "gamma" in line and line["algorithm"] == "simsiam"]
    names = list(dict.fromkeys(line["set"] for line in own))
    figure, panels = panels_of(len(names), most=4, size=(3.2, 2.6))
    for axes, name in zip(panels, names, strict=True):
        gammas = sorted({line["gamma"] for line in own if line["set"] == name})
        for method in ("fedgssl", "fedhssl"):
            values = [
                [*_by_seed(own, set=name, method=method, gamma=gamma).values()] for gamma in gammas
            ]
            axes.errorbar(
                gammas,
                [statistics.mean(one) for one in values],
                yerr=[_deviation(one) for one in values],
                marker="o",
                capsize=2,
                label=f"{method}, local encoders",
            )
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("gamma, weight of the guidance")
        axes.set_ylabel(f"test {own[0]['metric']}")
    panels[0].legend(fontsize=7)
    save(figure, out)


def plot(lines: Sequence[Line], out: Path) -> None:
    """Draw what methods gain over FedSplitNN by the number of labels, one panel a set."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fedhssl"
    from matplotlib import pyplot as plt

    plain = [line for line in lines if line.get("updates") is None]
    names = list(dict.fromkeys(line["set"] for line in plain))
    wide = min(4, len(names))
    high = -(-len(names) // wide)
    figure, axes = plt.subplots(high, wide, figsize=(3.4 * wide, 3.2 * high), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    styles = {
        "untrained": ("tab:gray", "o"),
        "fedlocalssl": ("tab:blue", "^"),
        "fedcssl": ("tab:green", "v"),
        "fedhssl": ("tab:red", "D"),
    }
    for axis, name in zip(axes.flat, names, strict=False):
        own = [line for line in plain if line["set"] == name]
        share = max(line["aligned"] for line in own if line.get("aligned"))
        own = [line for line in own if line.get("aligned") in (None, share)]
        numbers = sorted({line["labelled"] for line in own if line.get("algorithm")})
        for place, (method, (colour, marker)) in enumerate(styles.items()):
            gains = [
                list(_gains(own, method, "fedsplitnn", "simsiam", number).values())
                for number in numbers
            ]
            # Side by side within each number of labels: intervals would hide one another.
            shown = [
                (at + (place - len(styles) / 2) * 0.12, values)
                for at, values in enumerate(gains)
                if len(values) >= 3
            ]
            axis.errorbar(
                [at for at, _ in shown],
                [statistics.mean(values) for _, values in shown],
                yerr=[_half_interval(values) for _, values in shown],
                color=colour,
                marker=marker,
                markersize=4,
                linestyle="",
                capsize=2,
                label=method,
            )
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(numbers)), [str(number) for number in numbers])
        axis.set_title(f"{name}, {share:.0%} aligned")
        axis.set_xlabel("labelled rows")
        axis.set_ylabel(f"points of {own[0]['metric']} over fedsplitnn", fontsize=8)
        axis.grid(alpha=0.3, axis="y")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
