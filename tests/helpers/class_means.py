"""Federations whose encoders are class means, and every party's part as threads."""

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from helpers.built import Built
from helpers.federations import save, write_federation
from helpers.lines import Wires, run_all

from securevfl.stages.class_means.class_labels import ClassLabels
from securevfl.stages.class_means.class_means_stage import (
    ClassMeansPrimary,
    ClassMeansSecondary,
    deal_class_sums,
)

CLASSES = 3
BINS = CLASSES + 1


def write_class_means(
    folder: Path, *, labels: str = "shares", dealer: bool = True, **sections: Any
) -> Path:
    """Write a small federation of three classes that promises nothing; sections update its own."""
    path = write_federation(
        folder,
        rows=120,
        model={
            "release": "pooled",
            "top": "tied",
            "hidden": CLASSES,
            "heads": 1,
            "neighbours": 1,
            "keys_as_features": False,
        },
        base={"estimator": "linear"},
        encoder={"method": "class-means", "labels": labels, **sections.pop("encoder", {})},
        privacy=sections.pop(
            "privacy", {"mechanism": "none", "encoder": "frozen", "links_per_record": 1}
        ),
        linkage={"choose": "records", **sections.pop("linkage", {})},
        **sections,
    )
    if not dealer:
        return path
    source = tomllib.loads(path.read_text())
    source["party"].append({"name": "dealer", "role": "dealer"})
    return save(folder, source)


def class_labels(rows: int, **more: Any) -> ClassLabels:
    """Return drawn classes of some rows; a few are not for learning."""
    bins = np.random.default_rng(1).integers(0, BINS, rows)
    return ClassLabels(bins_of_rows=bins, bins=BINS, **more)


def fit_as_threads(
    one: Built, told: ClassLabels, *, instead: Mapping[str, Callable[[Wires], Any]] | None = None
) -> tuple[dict[str, Any], Wires]:
    """Run every party's part; return what each returned or raised, and what travelled.

    Args:
        one: The run.
        told: The primary's labels.
        instead: Who does something else, given all wires.
    """
    wires, config, plan = Wires(), one.plan.config, one.plan

    def secondary(rank: int) -> None:
        name = plan.secondaries[rank]
        class_means = one.secondaries[rank].class_means
        assert class_means is not None
        lines = wires.of(name)
        part = ClassMeansSecondary(plan, class_means, lines)
        wires.queue(config.primary.name, name).get(timeout=60)
        part()

    lives: dict[str, Callable[[], Any]] = {
        config.primary.name: lambda: ClassMeansPrimary(plan, wires.of(config.primary.name))(
            lambda _due: told
        )
    }
    for rank, name in plan.secondaries.items():
        lives[name] = partial(secondary, rank)
    dealer = config.helper("dealer")
    if dealer is not None:
        lives[dealer.name] = lambda: deal_class_sums(config, wires.of(dealer.name), plan.facts)
    for name, life in (instead or {}).items():
        lives[name] = partial(life, wires)
    return run_all(lives), wires
