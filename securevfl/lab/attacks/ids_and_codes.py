"""Leaks of linkage: guessed ids, and codes that are as frequent or as near as their keys.

References:
    [VSCR13] Vatsalan et al., A Taxonomy of Privacy-preserving Record Linkage Techniques, 2013,
    section 3.4 (dictionary and frequency attacks).
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.attack import Evidence, PartyView, UnavailableError
from securevfl.lab.attacks.reconstruction import decoder, varying

_KNOWN: Final = 30
"""Number of records whose keys the attacker by codes knows."""

_MOST_RECORDS: Final = 1500
"""Most records whose codes are read; a random sample of more."""

_GUESSES: Final = 10
"""Number of made-up ids for each of a secondary's own records."""


def _require_codes(evidence: Evidence) -> None:
    """Refuse runs that do not link by ids or words, or whose views are missing."""
    if not evidence.has_primary or not evidence.secondaries:
        raise UnavailableError("needs the views of the primary and of a secondary")
    views = (evidence.primary, *evidence.secondaries.values())
    if not all("link_keys" in view.held for view in views):
        raise UnavailableError(
            "parties link by numbers that have no codes, and not by ids or words"
        )


def _keys(view: PartyView) -> list[str]:
    keys: list[str] = list(view.held["link_keys"])
    return keys


def _guessed_ids(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the share of the primary's other ids that it finds."""
    _require_codes(evidence)
    if not all(key.isdecimal() for key in map(_whole, _keys(evidence.primary))):
        raise UnavailableError("ids are no whole numbers")
    theirs = {int(_whole(key)) for key in _keys(evidence.primary)}
    digits = len(str(max(theirs)))
    for view in evidence.secondaries.values():
        own = {int(key) for key in map(_whole, _keys(view)) if key.isdecimal()}
        wanted = sorted(theirs - own)
        if not own or not wanted:
            continue
        between = np.setdiff1d(np.arange(min(own), max(own) + 1), sorted(own))
        shares = []
        for seed in range(seeds):
            guesses = np.random.default_rng(seed).permutation(between)[: _GUESSES * len(own)]
            shares.append(float(np.isin(wanted, guesses).mean()))
        hits = round(float(np.mean(shares)) * len(wanted))
        listed = min(len(between), _GUESSES * len(own))
        yield attack.Leak(
            attack=GUESSED_IDS.name,
            attacker=view.name,
            about=evidence.config.primary.name,
            channel="linkage",
            measure="share of the primary's other ids that are found",
            value=float(np.mean(shares)),
            interval=attack.exact_interval(hits, len(wanted)),
            floor=min(1.0, listed / 10**digits),
            floor_is=f"as many of all numbers of {digits} digits",
            rows=len(wanted),
            known="how ids are written",
            seeds=seeds,
        )


def _whole(key: str) -> str:
    """Return an id without ``.0``: whole numbers of a column with gaps are read as floats."""
    return key.removesuffix(".0")


def _code_frequencies(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the share of its records whose key is guessed right."""
    _require_codes(evidence)
    coordinator = evidence.config.helper("coordinator")
    if coordinator is None:
        raise UnavailableError("no coordinator is sent codes")
    primary_keys = _keys(evidence.primary)
    if len(set(primary_keys)) == len(primary_keys):
        raise UnavailableError("no two rows have equal keys")
    ranked = [key for key, _ in Counter(primary_keys).most_common()]
    for view in evidence.secondaries.values():
        keys = _keys(view)
        # A code's own bits are not read: codes are equal or not.
        codes = [code for code, _ in Counter(keys).most_common()]
        guess = dict(zip(codes, ranked, strict=False))
        hits = sum(guess.get(key) == key for key in keys)
        yield attack.Leak(
            attack=CODE_FREQUENCIES.name,
            attacker=coordinator.name,
            about=view.name,
            channel="linkage",
            measure="share of records whose key is guessed",
            value=hits / len(keys),
            interval=attack.exact_interval(hits, len(keys)),
            floor=keys.count(ranked[0]) / len(keys),
            floor_is="always the most frequent key",
            rows=len(keys),
            known="how frequent keys are at the primary",
        )


def _code_places(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the share of its keys' variance that is explained."""
    if evidence.config.linkage.protection != "bloom":
        raise UnavailableError("no coordinator is sent codes of numbers")
    coordinator = evidence.coordinator
    if not any("own_keys" in view.held for view in evidence.secondaries.values()):
        raise UnavailableError("needs the view of a secondary that links by numbers")
    codes_of = {line["of"]: line["records"].numpy() for line in coordinator.of_kind("LINK_CODES")}
    for view in evidence.secondaries.values():
        if "own_keys" not in view.held or len(view.array("own_keys")) < 2 * _KNOWN:
            continue
        chosen = np.random.default_rng(0).permutation(len(view.array("own_keys")))
        keys = view.array("own_keys")[chosen[:_MOST_RECORDS]]
        bits = np.unpackbits(codes_of[view.name][chosen[:_MOST_RECORDS]], axis=1)
        bits = bits.astype(np.float64)
        targets = varying(keys)
        errors, spread = [], []
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(keys))
            known, left = order[:_KNOWN], order[_KNOWN:]
            guess = decoder(bits, targets, known)(left)
            errors.append(((targets[left] - guess) ** 2).sum(axis=1))
            mean = targets[known].mean(axis=0)
            spread.append(((targets[left] - mean) ** 2).sum(axis=1))
        wrong, trivial = np.mean(errors, axis=0), np.mean(spread, axis=0)
        yield attack.Leak(
            attack=CODE_PLACES.name,
            attacker=coordinator.name,
            about=view.name,
            channel="linkage",
            measure="R2; share of the keys' variance that is explained",
            value=attack.explained_share(wrong, trivial),
            interval=attack.explained_interval(wrong, trivial),
            floor=0.0,
            floor_is="the mean of known keys",
            rows=len(wrong),
            known=f"the keys of {_KNOWN} records",
            seeds=seeds,
        )


GUESSED_IDS = attack.Attack("guessed-ids", "links", _guessed_ids)
"""Attack by a secondary that adds made-up ids to its table: links show which the primary has.

The ids are whole numbers between its least and its largest id. No protection prevents it: all of
them compute equality in the tables that parties bring.
"""

CODE_FREQUENCIES = attack.Attack("code-frequencies", "keys", _code_frequencies)
"""Attack by the ranks of codes: the most frequent code is that of the most frequent key.

The coordinator has codes of both sides and knows how frequent keys are in general; the other side's
table stands for that knowledge.
"""

CODE_PLACES = attack.Attack("code-places", "keys", _code_places)
"""Attack by near codes: near numbers have near codes, and known keys decode the others."""
