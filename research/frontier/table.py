"""How research/frontier/frontier.py shows what it has found: a table and a panel a set."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from research.common.panels import panels_of, save
from research.frontier.surviving import any_code, noise_a_number, plan_of, surviving_share

Found = dict[str, dict[str, Any]]
"""Mean, deviation and seeds' values of every column, by method and epsilon."""


def surviving(epsilon: str, delta: float, secondaries: int) -> float:
    """Return the share of uncorrelated signals that is left behind a release's noise."""
    if epsilon == "none":
        return 1.0
    return surviving_share(noise=noise_at(epsilon, delta), secondaries=secondaries)


def noise_at(epsilon: str, delta: float) -> float:
    """Return the noise's deviation at an epsilon, in lengths of a record's vector."""
    options = argparse.Namespace(delta=delta, secondaries=1, fitting=0.05)
    plan = plan_of("secondary-record", float(epsilon), options, disjoint=False)
    return noise_a_number(plan, plan.noise_share_std())


def print_table(what: str, found: Mapping[str, Found], delta: float, *, every_seed: bool) -> None:
    """Print gains over alone, and the partners' part of them; bold where above two deviations.

    Below them: the share of signals that survives in numbers that secondaries share, and what each
    way to use labels has kept of its own gain without noise.
    """
    first = next(iter(next(iter(found.values())).values()))
    number = len(first["gain"]["seeds"])
    text = f"alone {first['alone']['mean']:.3f} ± {first['alone']['std']:.3f}"
    if "combine" in first:
        text += f", combine {first['combine']['mean']:.3f} ± {first['combine']['std']:.3f}"
    if "pooled" in first:
        text += f", pooled trees {first['pooled']['mean']:.3f} ± {first['pooled']['std']:.3f}"
    print(f"\n**{what}**, {number} seeds: {text}\n")
    epsilons = list(next(iter(found.values())))
    print(f"| gain over alone | {' | '.join(epsilons)} |\n| --- |{' --- |' * len(epsilons)}")
    for method, by_epsilon in found.items():
        cells = [_cell(columns["gain"]) for columns in by_epsilon.values()]
        print(f"| {method} | {' | '.join(cells)} |")
        cells = [_cell(columns["partners"]) for columns in by_epsilon.values()]
        print(f"| {method}, of it the partners' | {' | '.join(cells)} |")
    shared = _shared(first)
    told = [f"{surviving(epsilon, delta, shared):.2f}" for epsilon in epsilons]
    print(f"| *survives Gaussian noise, shared* | {' | '.join(told)} |")
    if shared == 1:
        most = [1.0 if at == "none" else any_code(noise_at(at, delta)) for at in epsilons]
        print(
            f"| *survives Gaussian noise, any code* | {' | '.join(f'{one:.2f}' for one in most)} |"
        )
    for method, by_epsilon in found.items():
        whole = by_epsilon.get("none", {"gain": {"mean": 0.0, "std": 0.0}})["gain"]
        if method == "principal" or whole["mean"] <= whole["std"]:
            continue
        kept = [f"{one['gain']['mean'] / whole['mean']:.2f}" for one in by_epsilon.values()]
        print(f"| *{method} keep of their own* | {' | '.join(kept)} |")
    if every_seed:
        for method, by_epsilon in found.items():
            for epsilon, columns in by_epsilon.items():
                values = " ".join(f"{value:+.3f}" for value in columns["gain"]["seeds"])
                print(f"{method} at {epsilon}: {values}")


def draw(results: Mapping[str, Mapping[str, Found]], delta: float, path: Path) -> None:
    """Draw gains over alone against epsilon, a panel a set; bars are deviations over seeds.

    Dashed: what the gain of the last method without noise would come to, if it kept the share of
    signals that survives.
    """
    figure, panels = panels_of(len(results), most=3, size=(4.2, 3.0))
    for axes, (what, found) in zip(panels, results.items(), strict=True):
        for shift, (method, by_epsilon) in enumerate(found.items()):
            places = np.arange(len(by_epsilon)) + 0.06 * (shift - len(found) / 2)
            gains = [columns["gain"] for columns in by_epsilon.values()]
            axes.errorbar(
                places,
                [gain["mean"] for gain in gains],
                [gain["std"] for gain in gains],
                marker="o",
                markersize=3,
                capsize=2,
                linewidth=1,
                label=method,
            )
        words = list(next(iter(found.values())))
        *_, (last, by_epsilon) = found.items()
        if "none" in by_epsilon:
            columns = by_epsilon["none"]
            shared, whole = _shared(columns), columns["gain"]["mean"]
            bound = [whole * surviving(epsilon, delta, shared) for epsilon in words]
            label = f"{last} without noise, times what survives"
            axes.plot(range(len(words)), bound, "--", color="0.5", linewidth=1, label=label)
        axes.axhline(0, color="0.3", linewidth=1)
        # A gain of nothing is to look like nothing.
        least = 0.02 * abs(next(iter(by_epsilon.values()))["alone"]["mean"])
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, -least), max(high, least))
        axes.set_xticks(range(len(words)), words)
        axes.set_xlabel("epsilon, one record of one secondary", fontsize=8)
        axes.set_title(f"{what}: gain over alone", fontsize=8)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=6)
    save(figure, path)


def _cell(gain: Mapping[str, float]) -> str:
    text = f"{gain['mean']:+.3f} ± {gain['std']:.3f}"
    return f"**{text}**" if gain["mean"] > 2 * gain["std"] > 0 else text


def _shared(columns: Mapping[str, Any]) -> int:
    return int(columns["secondaries"]["mean"])
