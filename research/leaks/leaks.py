"""What leaks: attacks on recorded runs, with and without noise, each next to a trivial guess.

    SECUREVFL_DATA=... python research/leaks/leaks.py [SET ...] [--runs plain,averaged,...]
        [--seeds 3] [--training-seeds 1] [--defences] [--out runs/leaks] [--all]

Prints a line a run: of each kind of attack what gains most over its trivial guess (in brackets),
over all secondaries; ``--all`` prints each. Runs: ``plain`` (one secondary, encoders that are
trained, no noise: split learning), ``averaged`` (all secondaries, trained, no noise), ``first-2``
(the same of the first two), ``trained-8`` and so on (behind noise of that epsilon, ``dp-trained``),
``frozen-none``, ``frozen-8`` and so on (class means, released once). ``averaged+label-4`` draws
labels at that epsilon. ``averaged+active``: the first secondary trains as [FZJ22] has it, so
that its own encoder tells more. ``shares``, ``shares-CELL`` (a grid cell's width) and ``bloom``:
one epoch, linked by a coordinator. ``--defences`` runs those of research/leaks/README.md, and
``--attacks`` tries some alone. ``joint`` is the test figure. A run that is done is not run again.
With several ``--training-seeds`` figures are means over them, with their standard deviation; bold
is what beats its guess with every seed. ``--shadows 16`` prints instead what as many shadow runs of
each find: which rows, and which of the first secondary's records, a kept model has learned from.
Sets: digits, mfeat6, fate_breast, hdb, mnist10; digits11 has 10 secondaries.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.linked_tables import Tables
from research.frontier.frontier import DELTA, SETS, federation_of, pixels
from securevfl.config.reading import parse_federation
from securevfl.data.tables import PartyTable
from securevfl.federation import build as building
from securevfl.lab.attacks.run_audit import TRAIN_ANEW, attack_names, audit_run
from securevfl.lab.attacks.shadow_runs import Shadows
from securevfl.models.optimisers import PacedOptimizer
from securevfl.runtime import simulation
from securevfl.runtime.run_folder import read_figures
from securevfl.runtime.run_options import RunOptions

EPSILONS = ("8", "4", "1")
RUNS = (
    "plain",
    "averaged",
    *(f"trained-{one}" for one in EPSILONS),
    "frozen-none",
    *(f"frozen-{one}" for one in EPSILONS),
)
NAMES = ("digits", "mfeat6", "fate_breast")
DEFENDED = ("averaged", "averaged+label-4", "averaged+label-2", "averaged+label-1")


def halves(table: PartyTable) -> list[PartyTable]:
    """Deal a secondary's columns to two, in turn; those that never vary are left out."""
    found = []
    varying = np.flatnonzero(table.features.std(axis=0) > 0)
    for number in range(2):
        columns = varying[number::2]
        found.append(
            dataclasses.replace(
                table,
                name=f"{table.name}{number + 1}",
                features=table.features[:, columns],
                feature_names=tuple(table.feature_names[one] for one in columns),
            )
        )
    return found


def tables_of(name: str) -> Tables:
    """Return a set; the one secondary of two parties' tables is dealt to two."""
    found = pixels("digits", 11, 1_797, 4, (-6.0, 16.0)) if name == "digits11" else SETS[name]
    tables = found.make(0)
    if len(tables.parties) == 2:
        primary, secondary = tables.parties
        tables = dataclasses.replace(tables, parties=[primary, *halves(secondary)])
    return tables


def source_of(name: str, run: str, tables: Tables, *, seed: int) -> dict[str, Any]:
    """Return the federation file of a run."""
    run, _, defence = run.partition("+")
    kind, _, epsilon = run.partition("-")
    first, cell = None, ""
    if kind in ("plain", "first"):
        first, epsilon = int(epsilon or 1), ""
    if kind == "shares":
        epsilon, cell = "", epsilon
    source = federation_of(
        "digits" if name == "digits11" else name, tables, seed, epsilon or "none", "shares"
    )
    source["base"] = {"estimator": "linear" if kind == "frozen" else "none"}
    if kind == "frozen":
        return source
    del source["encoder"]
    source["party"] = [one for one in source["party"] if one["role"] != "dealer"]
    if first is not None:
        source["party"] = source["party"][: 1 + first]
    exact = source["model"]["neighbours"] == 1
    source["model"] = {
        "family": "fet",
        "neighbours": 1 if exact else 4,
        "hidden": 32,
        "heads": 2,
        "release": "pooled",
        "average_positions_every": 0,
    }
    source["training"] = {
        # Behind noise each epoch costs budget.
        "epochs": 5 if epsilon else 30,
        "patience": 30,
        "batch_size": 128,
        "learning_rate": 3e-3,
        "split": "random",
    }
    if defence and defence != "active":
        source["training"]["label_epsilon"] = float(defence.removeprefix("label-"))
    source["privacy"] = {"mechanism": "none", "encoder": "trained"}
    if epsilon:
        source["privacy"] = {
            "epsilon": float(epsilon),
            "delta": DELTA,
            "unit": "secondary-record",
            "links_per_record": 1,
            "encoder": "dp-trained",
        }
    source["linkage"].pop("choose")
    if kind in ("shares", "bloom"):
        source["training"]["epochs"] = 1
        hide(source, tables, kind, cell)
    return source


def hide(source: dict[str, Any], tables: Tables, protection: str, cell: str) -> None:
    """Let a coordinator find the links; codes of numbers need ranges of one width."""
    keys = np.concatenate([one.keys for one in tables.parties])
    low, width = keys.min(axis=0), float(np.ptp(keys, axis=0).max())
    helpers = ["coordinator"]
    if protection == "shares":
        helpers.append("dealer")
    source["linkage"] |= {
        "protection": protection,
        "ranges": [[float(one), float(one) + width] for one in low],
        **({"cell": float(cell)} if cell else {}),
    }
    source["party"] += [{"name": one, "role": one} for one in helpers]


class Amplified:
    """A secondary's optimizer whose steps are larger where gradients keep their sign.

    The joint model then leans on this secondary's encoder, which learns more of labels: Fu et al.,
    Label Inference Attacks Against Vertical Federated Learning, USENIX Security 2022, Algorithm 1
    (malicious local optimizer), on the steps of the run's own optimizer.
    """

    def __init__(self, inner: PacedOptimizer, *, decay: float = 0.9, most: float = 5.0) -> None:
        self._inner, self._decay, self._most = inner, decay, most
        self._velocities = [torch.zeros_like(one) for one in inner.parameters]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, *, epoch: int) -> None:
        """Take a step, made longer number by number."""
        parameters = self._inner.parameters
        before = [one.detach().clone() for one in parameters]
        self._inner.step(epoch=epoch)
        for place, (one, was) in enumerate(zip(parameters, before, strict=True)):
            if one.grad is None:
                continue
            last = self._velocities[place]
            now = self._decay * last + (1 - self._decay) * one.grad
            ratio = (1 + now / torch.where(last == 0, torch.inf, last)).clamp(1.0, self._most)
            with torch.no_grad():
                one.copy_(was + ratio * (one - was))
            self._velocities[place] = now


@contextmanager
def amplifying(attacker: str | None) -> Iterator[None]:
    """Let a secondary of simulations train by the malicious optimizer; None alters none."""
    build = vars(building)["build_secondary"]

    def altered(plan: Any, party: Any, *rest: Any, **options: Any) -> Any:
        secondary: Any = build(plan, party, *rest, **options)
        if party.name == attacker:
            secondary.optimizer = Amplified(secondary.optimizer)
        return secondary

    with mock.patch.object(building, "build_secondary", altered):
        yield


def measured(
    name: str,
    run: str,
    folder: Path,
    *,
    attacks: Sequence[str],
    seed: int,
    seeds: int,
    shadows: int = 0,
) -> dict[str, Any]:
    """Train and attack a run, by shadow runs alone if there are any, or read what was found."""
    tables = tables_of(name)
    place = folder / f"{name}-{run}{f'-seed{seed}' if seed else ''}"
    config = parse_federation(source_of(name, run, tables, seed=seed), file="leaks")
    own = {one.name: one for one in tables.parties}
    own = {party.name: own[party.name] for party in config.table_parties}
    if not (place / "metrics.json").exists():
        options = RunOptions(run_folder=place, record_mib=1024)
        attacker = config.secondaries[0].name if run.endswith("+active") else None
        with amplifying(attacker):
            simulation.simulate_federation(config, own, options, with_alone=False)
    figures = read_figures(place)
    if shadows:
        trained = Shadows(tables=own, runs=shadows, tell=partial(print, file=sys.stderr))
        audit = audit_run(place, TRAIN_ANEW, seeds=seeds, shadows=trained)
    else:
        audit = audit_run(place, attacks, seeds=seeds)
    return {
        "set": name,
        "run": run,
        "metric": figures["metric"],
        "joint": figures["test"],
        "epsilon": audit.epsilon,
        "findings": audit.findings,
        "violations": audit.violations,
        "seconds": audit.seconds,
    }


COLUMNS = {
    "labels, gradients": ("gradient-norm", "gradient-direction", "gradient-clusters"),
    "labels, own encoder": ("model-completion",),
    "columns (R2)": ("reconstruction",),
    "links (AUC)": ("linked-or-not",),
    "member": ("membership",),
}
"""Headings of the brief table, and the attacks below them."""


def brief(of_seeds: list[list[dict[str, Any]]], attacks: tuple[str, ...]) -> str:
    """Return what gains most over its trivial guess, of some attacks on all parties."""
    best = []
    for findings in of_seeds:
        tried = [one for one in findings if one["attack"] in attacks]
        if not tried:
            return "-"
        best.append(max(tried, key=lambda one: one["value"] - one["floor"]))
    mark = "**" if all(one["beats_floor"] for one in best) else ""
    value = spread([one["value"] for one in best])
    return f"{mark}{value}{mark} ({np.mean([one['floor'] for one in best]):.2f})"


def spread(values: list[float]) -> str:
    """Return a mean, with the standard deviation of several."""
    return f"{np.mean(values):.2f}" + (
        f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    )


def print_shadowed(name: str, found: dict[str, Any]) -> None:
    """Print what shadow runs found: AUC, and members found at 0.1 and 0.01 false positives."""
    cells = []
    for one in found["findings"]:
        mark = "**" if one["beats_floor"] else ""
        low, high = one["interval"]
        cells.append(f"{mark}{one['value']:.3f}{mark} ({low:.3f} to {high:.3f})")
    print(f"| {name} | {found['joint']:.2f} |", " | ".join(cells), "|", flush=True)


def print_all(name: str, found: dict[str, Any]) -> None:
    """Print a line an attack and party."""
    for one in found["findings"]:
        low, high = one["interval"]
        mark = "**" if one["beats_floor"] else ""
        ceiling = "" if one["ceiling"] is None else f"{one['ceiling']:.3f}"
        print(
            f"| {name} | {one['attack']} | {one['about']} | {one['measure'].partition(';')[0]} "
            f"| {mark}{one['value']:.3f}{mark} ({low:.3f} to {high:.3f}) | {one['floor']:.3f} "
            f"| {ceiling} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", help=f"default: {', '.join(NAMES)}")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--training-seeds", type=int, default=1)
    parser.add_argument("--defences", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/leaks"))
    parser.add_argument("--all", action="store_true", help="a line an attack and party")
    parser.add_argument("--shadows", type=int, default=0, help="shadow runs of each run")
    parser.add_argument("--attacks", help="default: all")
    options = parser.parse_args()
    attacks = attack_names(options.attacks)
    heads = ["set, run", "joint", *COLUMNS]
    if options.shadows:
        rates = ("AUC", "at 0.1", "at 0.01")
        heads = [
            "set, run",
            "joint",
            *(f"{one[7:]}: {rate}" for one in TRAIN_ANEW for rate in rates),
        ]
    if options.all:
        heads = ["set, run", "attack", "on", "measure", "found", "trivial guess", "ceiling"]
    print("|", " | ".join(heads), "|")
    print("|", " | ".join("---" for _ in heads), "|")
    for name in options.sets or NAMES:
        for run in DEFENDED if options.defences else options.runs.split(","):
            found = [
                measured(
                    name,
                    run,
                    options.out,
                    attacks=attacks,
                    seed=seed,
                    seeds=options.seeds,
                    shadows=options.shadows,
                )
                for seed in range(options.training_seeds)
            ]
            if options.shadows:
                print_shadowed(f"{name}, {run}", found[0])
                continue
            if options.all:
                print_all(f"{name}, {run}", found[0])
                continue
            joint = spread([one["joint"] for one in found])
            findings = [one["findings"] for one in found]
            cells = [brief(findings, attacks) for attacks in COLUMNS.values()]
            print(f"| {name}, {run} | {joint} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
