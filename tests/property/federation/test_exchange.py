"""One record, or one label, exchanged over keys that an attacker chooses: what all others receive.

The primary's table holds invented ids, one suspect's and those next to it. Runs with the suspect's
record, without it and with a stranger's in its place are played whole, with predictions, and all
that other parties receive is compared, with how each run ended and what others read of it. Given
the same answers behind noise it is the same to the bit; the sums before noise move by no more than
noise is made for; and under other noise every number that noise covers is another one.

In one process nothing is masked and no message is sealed; what crosses the wire in linking is
compared below, protection by protection, field by field, as each message's own table says.
"""

import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.lines import link_as_threads
from helpers.linking import HELPERS, RANGES, SHORT_KEY, hidden_spec
from helpers.removal import WholeRun, whole_run
from torch import Tensor

from securevfl import read_federation
from securevfl.config.federation import FederationConfig
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.dp.class_sums import Moments
from securevfl.linkage.spec import LinkRoles
from securevfl.linkage.stage.messages import LinkingKind
from securevfl.models.registry import FAMILIES
from securevfl.stages.encrypted_linkage import homomorphic, paillier
from securevfl.testing import read_tables, save_federation, write_federation
from securevfl.transport.message import (
    DeclaredMessage,
    Message,
    TypedMessage,
    failure_kind,
    public_reason,
)

ROWS, RECORDS, CAP = 48, 8, 2
SUSPECT = 77
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-4, "encoder": "frozen", "links_per_record": CAP}
TRAINED = {**PRIVACY, "encoder": "trained"}
DP_TRAINED = {**PRIVACY, "encoder": "dp-trained"}
NO_NOISE = {"mechanism": "none", "encoder": "trained"}
POOLED = {"release": "pooled", "hidden": 4, "neighbours": 2, "heads": 1, "keys_as_features": False}
DIRECTIONS = {**POOLED, "top": "additive"}
TIED = {**POOLED, "hidden": 3, "top": "tied"}
PAIR = {"hidden": 4, "layer_width": 4}
SSL = {"batch_size": 16, "projector": [4, 4, 4], "predictor": 4, "iterations": 1}
EXACT = {"protection": "psi", "metric": "exact", "choose": "records", "least_linked": 0.0}
NEAR = {"metric": "euclidean", "choose": "records", "max_distance": 1.5, "least_linked": 0.0}
NEAREST = {"metric": "euclidean", "least_linked": 0.0}


def class_means(labels: str, **more: Any) -> dict[str, Any]:
    return {
        "model": TIED,
        "encoder": {"method": "class-means", "labels": labels, "share": 0.3},
        "base": {"estimator": "linear"},
        "linkage": NEAR,
        **more,
    }


SCORES = {
    "federation": {"task": "regression"},
    "model": {**TIED, "hidden": 1},
    "privacy": {"epsilon": 16.0, "delta": 1e-4, "encoder": "frozen", "links_per_record": CAP},
}

RUNS: dict[str, dict[str, Any]] = {
    "random": {"model": DIRECTIONS, "encoder": {"method": "random"}, "linkage": EXACT},
    "principal": {
        "model": DIRECTIONS,
        "encoder": {"method": "principal", "share": 0.3},
        "linkage": NEAR,
    },
    "class means, plaintext": class_means("plaintext"),
    "class means, randomised": class_means("randomised", linkage=EXACT),
    "class means, shares": class_means("shares"),
    "scores, shares": class_means("shares", **SCORES),
    # So little noise that its tenfold is less than a tenth of the rows: linked rows are counted.
    "counted": {
        "model": DIRECTIONS,
        "encoder": {"method": "random"},
        "privacy": {**PRIVACY, "noise_multiplier": 0.3, "links_per_record": 1},
        "linkage": {**NEAREST, "choose": "records"},
    },
    "sampled": {"model": POOLED, "privacy": {**PRIVACY, "sampling_rate": 0.5}, "linkage": NEAREST},
    "dp-trained": {"model": POOLED, "privacy": DP_TRAINED, "linkage": NEAREST},
    "trained": {"model": POOLED, "privacy": TRAINED, "linkage": NEAREST},
    "entity": {
        "model": DIRECTIONS,
        "encoder": {"method": "random"},
        "privacy": {**PRIVACY, "unit": "entity"},
        "linkage": EXACT,
    },
}


def write(folder: Path, **sections: Any) -> Path:
    """Write a federation whose primary asks for a suspect, who is the last record of ``bank-1``."""
    settings = {"privacy": PRIVACY, "training": {"batch_size": 16, "epochs": 2}, **sections}
    path = write_federation(folder, rows=ROWS, **settings)
    source = tomllib.loads(path.read_text())
    for number, party in enumerate(source["party"]):
        table = folder / party["data"]
        frame = pd.read_csv(table).drop(columns=["lon", "lat"])
        ids = 1_000_000 * number + 5_000 + 10 * np.arange(len(frame))
        if number:
            frame, ids = frame.head(RECORDS), ids[:RECORDS]
            party |= {"scaling": "bounds", "bounds": [-3.0, 3.0]}
        else:
            ids[7:10] = SUSPECT - 1, SUSPECT, SUSPECT + 1
            if source["federation"]["task"] == "binary":
                frame["y"] = frame["y"].clip(upper=1)
        if number:
            ids[-1] = SUSPECT if number == 1 else 5_000
        frame.insert(0, "id", ids)
        frame.to_csv(table, index=False)
        party["key"] = ["id"]
    if source.get("encoder", {}).get("labels") == "shares":
        source["party"].append({"name": "dealer", "role": "dealer"})
    return save_federation(folder, source)


def read(path: Path) -> tuple[FederationConfig, dict[str, PartyTable]]:
    config = read_federation(path)
    return config, dict(read_tables(config, path.parent))


def others(path: Path) -> Iterator[tuple[int, dict[str, PartyTable]]]:
    """Yield all tables without the suspect, and with a stranger in its place, and the changes."""
    table = path.parent / "bank-1.csv"
    frame = pd.read_csv(table)
    for changes in (1, 2):
        other = frame.iloc[:-1].copy()
        if changes == 2:
            stranger = frame.iloc[[-1]].copy()
            stranger["id"] = 9_999_999
            stranger[["x0", "x1", "x2"]] *= -1e6
            other = pd.concat([other, stranger])
        other.to_csv(table, index=False)
        yield changes, read(path)[1]
    frame.to_csv(table, index=False)


def require_same(here: WholeRun, there: WholeRun) -> None:
    """Check that others received the same of two runs, step by step."""
    for mine, theirs in zip(here.received, there.received, strict=False):
        assert theirs == mine, f"others receive another {mine[0]!r}: {str(theirs)[:300]}"
    assert len(there.received) == len(here.received)


def require_all_noised(here: WholeRun, others: list[WholeRun]) -> None:
    """Check that each number that noise covers is another one under some other noise."""

    def numbers(answer: Any) -> np.ndarray:
        if isinstance(answer, Moments):
            parts = (answer.count, answer.mean, answer.covariance)
            return np.concatenate([np.ravel(one) for one in parts])
        return answer.numpy() if isinstance(answer, Tensor) else np.asarray(answer)

    for place, mine in enumerate(here.sums):
        symbols = here.plans[mine.session].releases.symbols is not None
        if mine.what in ("labels", "class sums") or (symbols and mine.what == "rows"):
            continue
        fresh = [numbers(one.sums[place].fresh) for one in (here, *others)]
        still = np.all([one == fresh[0] for one in fresh[1:]], axis=0)
        if mine.what == "ranks":
            # They are drawn back into [0, 1].
            still &= (fresh[0] > 0) & (fresh[0] < 1)
        if mine.what == "symbols":
            # A symbol may well be drawn again.
            still = still & still.all()
        assert not still.any(), (
            f"{mine.what} of {mine.party}: {np.argwhere(still)[:3]} have no noise"
        )
    for place, sums in enumerate(here.noised_sums):
        still = np.all([one.noised_sums[place] == sums for one in others], axis=0)
        assert not still.any(), f"class sums: {np.argwhere(still)[:3]} have no noise"


@pytest.mark.parametrize("name", RUNS)
def test_a_suspect_is_nowhere_but_behind_noise(name: str, tmp_path: Path) -> None:
    """Its record there, gone, or a stranger's: the same for the others, but for noised sums."""
    path = write(tmp_path, **RUNS[name])
    config, tables = read(path)
    requests = ((7, 8, 9), (8,), (8, 30))
    here = whole_run(config, tables, tmp_path / "here", requests=requests)
    assert here.received[-1] == ("end",)
    assert ("linked rows" in {one.what for one in here.sums}) == (name == "counted")
    furthest = 0.0
    for changes, other in others(path):
        folder = tmp_path / f"other-{changes}"
        there = whole_run(config, other, folder, before=here, requests=requests)
        require_same(here, there)
        ratios = here.ratios(there)
        if config.privacy.encoder != "trained":
            assert max(ratios.values()) <= changes + 1e-9, ratios
        furthest = max(furthest, *ratios.values())
    assert furthest > 0.02, "the suspect has some effect"
    again = [
        whole_run(config, tables, tmp_path / series, before=here, requests=requests, noise=series)
        for series in ("one", "two")
    ]
    require_all_noised(here, again)


@pytest.mark.parametrize(("name", "rounds"), [("principal", 2), ("dp-trained", 6)])
def test_a_resumed_run_shows_no_more(name: str, rounds: int, tmp_path: Path) -> None:
    """Cut off in the middle, and resumed from what every party has kept."""
    path = write(tmp_path, **RUNS[name])
    config, tables = read(path)
    here = whole_run(config, tables, tmp_path / "here", requests=(), cut_off=rounds)
    assert ("cut off",) in here.received
    assert here.received[-1] == ("end",)
    for changes, other in others(path):
        folder = tmp_path / f"other-{changes}"
        there = whole_run(config, other, folder, before=here, requests=(), cut_off=rounds)
        require_same(here, there)


FAMILY_RUNS: dict[str, dict[str, Any]] = {
    "fet": {"model": POOLED},
    **{
        name: {"model": {"family": name, **PAIR}, "privacy": TRAINED}
        for name in ("exact", "top1sim")
    },
    **{
        name: {"model": {"family": name, **PAIR, "neighbours": 2}, "privacy": TRAINED}
        for name in ("avgsim", "fedsim", "featuresim")
    },
    **{
        name: {
            "model": {"family": name, "hidden": 4, "encoder_hidden": 4, "norm": "layer"},
            "privacy": TRAINED,
            "pretraining": SSL,
        }
        for name in ("fedhssl", "fedgssl", "fedcssl", "fedlocalssl", "fedsplitnn")
    },
}
REFUSED = {"fedsim", "featuresim", "fedhssl", "fedgssl", "fedcssl"}
"""What a promise refuses, before keys are linked."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "class-means"])
def test_every_family_is_refused_or_shows_nothing(name: str, tmp_path: Path) -> None:
    """Also links themselves: gaps of what the primary gets, and rows that it learns of."""
    source = {"linkage": {**NEAREST, "max_distance": 1.5}, **FAMILY_RUNS[name]}
    path = write(tmp_path, **source, federation={"task": "binary"})
    config, tables = read(path)
    here = whole_run(config, tables, tmp_path / "here", requests=((8,),))
    if name in REFUSED:
        ((what, kind, text, code),) = here.received
        assert (what, kind, code) == ("end", "failed", 4), text
        assert "epsilon would" in text
    for changes, other in others(path):
        folder = tmp_path / f"other-{changes}"
        require_same(here, whole_run(config, other, folder, before=here, requests=((8,),)))
    assert name in REFUSED or here.received[-1] == ("end",)


def test_a_count_of_links_ends_no_run(tmp_path: Path) -> None:
    """Nobody but the suspect is linked, so that a stranger in its place leaves no link at all."""
    linkage = {name: value for name, value in EXACT.items() if name != "least_linked"}
    path = write(tmp_path, **{**RUNS["random"], "linkage": linkage})
    config, tables = read(path)
    here = whole_run(config, tables, tmp_path / "here", requests=())
    assert here.received[-1] == ("end",)
    for changes, other in others(path):
        folder = tmp_path / f"other-{changes}"
        require_same(here, whole_run(config, other, folder, before=here, requests=()))


NUMBERS = {"metric": "euclidean", "ranges": RANGES}
FAILS_ON_SUSPECT = "9 // length(replace(lon, 'suspected', ''))"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plaintext": ("none", NUMBERS),
    "plaintext, great circle": ("none", {"metric": "great-circle"}),
    "plaintext, edits": ("none", {"metric": "levenshtein", "ranges": None}),
    "plaintext, a rule that fails on the suspect": (
        "none",
        {"metric": "levenshtein", "ranges": None, "blocking": FAILS_ON_SUSPECT},
    ),
    "plaintext, exact": ("none", {"metric": "exact", "ranges": None}),
    "psi": ("psi", {"metric": "exact", "ranges": None}),
    "hashes": ("hashes", {"metric": "exact", "ranges": None}),
    "bloom": ("bloom", {"metric": "bloom", "ranges": None}),
    "shares": ("shares", NUMBERS),
    "paillier": ("paillier", {**NUMBERS, "key_bits": SHORT_KEY}),
}
CHOICES: dict[str, dict[str, Any]] = {
    "rows": {},
    "rows, capped": {"links_per_record": CAP},
    "records": {"by": "records", "links_per_record": CAP, "once": True},
}


def keys_over_wires(metric: str) -> dict[str, list[KeyTable]]:
    """Return keys of each party: of ``bank`` with the suspect, without it, with a stranger."""
    random = np.random.default_rng(8)
    points = random.uniform(0, 10, (20 + 2 * RECORDS, 2))
    points[3], points[4], points[20] = (5, 5), (5, 5.01), (5, 5)
    columns = {"lon": points[:, 0], "lat": points[:, 1]}
    if metric not in ("euclidean", "great-circle"):
        words = ["".join(map(chr, word)) for word in random.integers(97, 123, (len(points), 9))]
        words[3], words[4], words[20] = "suspected", "suspectee", "suspected"
        columns = {name: np.array(words, dtype=object) for name in columns}
    bank = [*range(20, 20 + RECORDS)]
    rows = {"agency": [[*range(20)]], "shop": [[*range(20 + RECORDS, len(points))]]}
    stranger = [len(points) - 1, *bank[1:]]
    rows["bank"] = [[*bank[1:], bank[0]], bank[1:], [*bank[1:], stranger[0]]]
    return {
        party: [
            KeyTable(name=party, columns={name: one[some] for name, one in columns.items()})
            for some in worlds
        ]
        for party, worlds in rows.items()
    }


ROLES = {"agency": "primary", "bank": "secondary", "shop": "secondary"}


def type_of(message: Message, sender: str, receiver: str) -> type[TypedMessage]:
    """Return the type of a message by its kind and its way."""

    def fits(end: str, party: str) -> bool:
        return "data party" in end or ROLES.get(party, party) in end

    (found,) = {
        one
        for one in (*TypedMessage.__subclasses__(), *DeclaredMessage.__subclasses__())
        if getattr(one, "KIND", None) is message.kind
        and fits(one.WAY.partition(" to ")[0], sender)
        and fits(one.WAY.partition(" to ")[2], receiver)
        and (message.kind is not LinkingKind.LINKED or bool(fields(one)) == bool(message.tensors))
        and getattr(sys.modules[one.__module__], one.__name__) is one
    }
    return found


def differing(
    mine: Message, theirs: Message, kind: type[TypedMessage], *, free: set[str]
) -> Iterator[str]:
    """Yield which fields differ that are not under any of the ``free`` channels.

    Lengths may differ by less: the primary passes on what others seal, and sees them.
    """
    of_wire = {
        (one.metadata["wire"].name if "wire" in one.metadata else "") or one.name: one.name
        for one in fields(kind)
    }

    def held(field: str) -> bool:
        # What a message writes in several arrays stands for all that it has.
        known = of_wire.get(field, field)
        covers = {cover for cover, names in kind.COVERS.items() if known in names.split()}
        allowed = free - {"linkage"} if field == "lengths" else free
        return not (covers or set(kind.COVERS)) & allowed

    if mine.meta.keys() != theirs.meta.keys() or mine.tensors.keys() != theirs.tensors.keys():
        yield "its fields"
    for name, value in mine.meta.items():
        if held(name) and theirs.meta[name] != value:
            yield name
    for name, array in mine.tensors.items():
        other = theirs.tensors[name]
        if other.dtype != array.dtype or (held("lengths") and other.shape != array.shape):
            yield f"{name}'s type or length"
        elif held(name) and not np.array_equal(other, array):
            yield name


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("way", WAYS)
def test_linking_sends_what_the_table_of_fields_says(
    way: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the primary nothing of a record but how many there are, where the table says so."""
    monkeypatch.setattr(
        paillier, "Keyholder", partial(homomorphic.Keyholder, insecure_short_key=True)
    )
    protection, settings = WAYS[way][0], dict(WAYS[way][1])
    helpers = {} if protection in ("none", "psi") else HELPERS
    roles = LinkRoles(primary="agency", secondaries=("bank", "shop"), helpers=helpers)
    rules = (settings.pop("blocking"),) if "blocking" in settings else None
    spec = hidden_spec(protection, **settings, roles=roles)
    if rules is not None:
        spec = replace(spec, keys=replace(spec.keys, blocking=rules))
    spec = replace(spec, choice=replace(spec.choice, neighbours=2, **CHOICES[choice]))
    keys = keys_over_wires(settings["metric"])
    worlds = []
    for bank in keys["bank"]:
        tables = {"agency": keys["agency"][0], "bank": bank, "shop": keys["shop"][0]}
        found, wires = link_as_threads(spec, tables)
        told = {
            name: (failure_kind(one), public_reason(one)) if isinstance(one, Exception) else "done"
            for name, one in found.items()
        }
        assert set(told.values()) == {"done"}, told
        sent = defaultdict(list)
        for sender, receiver, message in wires.travelled:
            sent[sender, receiver].append(message)
        worlds.append(sent)
    here, *others = worlds
    compared = set()
    for there, gone in zip(others, (True, False), strict=True):
        assert there.keys() == here.keys()
        for (sender, receiver), messages in here.items():
            if sender == "agency":
                continue
            # Nothing is kept here, so each tag is a new one.
            counts = {"record counts", "sizes and times"} if gone else set()
            free = {"masks", "kept links"} | counts
            if receiver != "agency":
                free.add("linkage")
            for mine, theirs in zip(messages, there[sender, receiver], strict=True):
                assert mine.kind is theirs.kind
                kind = type_of(mine, sender, receiver)
                compared.add(kind.__name__)
                wrong = [*differing(mine, theirs, kind, free=free)]
                assert not wrong, f"{kind.__name__} of {sender} to {receiver}: {wrong}"
    assert "Linked" in compared
