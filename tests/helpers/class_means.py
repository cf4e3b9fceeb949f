"""Federations whose encoders are class means, and every party's part as threads."""

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from helpers.built import Built
from helpers.lines import Wires, run_all

from securevfl.core.progress import unheard
from securevfl.federation.session.peers import Peers, PeersHere
from securevfl.lab.audit.audit_party import ThreadPeers, answer_messages
from securevfl.stages.class_means.class_labels import ClassLabels
from securevfl.stages.class_means.fitting import ClassMeansFitting
from securevfl.stages.class_means.parties import (
    ClassMeansPrimary,
    ClassMeansSecondary,
    MaskedLines,
    SumsInOneProcess,
    SumsUnderMasks,
    deal_class_sums,
)
from securevfl.testing import save_federation, write_federation
from securevfl.transport.channels import Channels

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
            **sections.pop("model", {}),
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
    return save_federation(folder, source)


def class_labels(rows: int, **more: Any) -> ClassLabels:
    """Return drawn classes of some rows; a few are not for learning."""
    bins = np.random.default_rng(1).integers(0, BINS, rows)
    return ClassLabels(bins_of_rows=bins, bins=BINS, **more)


def fittings(one: Built) -> dict[int, ClassMeansFitting]:
    """Return what each secondary's encoder is fitted by, by rank; a release calls it."""
    found = {}
    for rank, secondary in one.secondaries.items():
        kept = secondary.kept
        assert kept is not None
        if not isinstance(kept.fit, ClassMeansFitting):
            party = one.plan.config.party(secondary.name)
            kept.fit = ClassMeansFitting(one.plan, party, kept)
        assert isinstance(kept.fit, ClassMeansFitting)
        found[rank] = kept.fit
    return found


def fit_here(one: Built, told: ClassLabels) -> None:
    """Run every party's part in one process."""
    parts = {rank: ClassMeansSecondary(one.plan, fit) for rank, fit in fittings(one).items()}
    peers = PeersHere({rank: part.beside_rounds for rank, part in parts.items()})
    sums = SumsInOneProcess(one.plan, peers)
    part = ClassMeansPrimary(one.plan, peers, lambda _due: told, sums=sums, observe=unheard)
    part.before_release()


def secondary_part(one: Built, rank: int, lines: Channels) -> ClassMeansSecondary:
    """Return a secondary's part between processes."""
    dealer = one.plan.config.helper("dealer")
    masked = None if dealer is None else MaskedLines(lines, dealer.name)
    return ClassMeansSecondary(one.plan, fittings(one)[rank], masked)


def primary_part(
    one: Built, told: ClassLabels, lines: Channels, *, peers: Peers | None = None
) -> ClassMeansPrimary:
    """Return the primary's part between processes."""
    dealer = one.plan.config.helper("dealer")
    return ClassMeansPrimary(
        one.plan,
        ThreadPeers(lines, one.plan.secondaries) if peers is None else peers,
        lambda _due: told,
        sums=None if dealer is None else SumsUnderMasks(one.plan, lines, dealer.name),
        observe=unheard,
    )


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
    primary, dealer = config.primary.name, config.helper("dealer")

    def secondary(rank: int) -> None:
        lines = wires.of(plan.secondaries[rank])
        part = secondary_part(one, rank, lines)
        # Where labels are sent, they follow the call.
        follows = dealer is None and not part.fitting.encoder_fixed
        answer_messages(part.beside_rounds, lines, primary, count=2 if follows else 1)

    lives: dict[str, Callable[[], Any]] = {
        primary: primary_part(one, told, wires.of(primary)).before_release
    }
    for rank, name in plan.secondaries.items():
        lives[name] = partial(secondary, rank)
    if dealer is not None:
        lives[dealer.name] = lambda: deal_class_sums(config, wires.of(dealer.name), plan.facts)
    for name, life in (instead or {}).items():
        lives[name] = partial(life, wires)
    return run_all(lives), wires
