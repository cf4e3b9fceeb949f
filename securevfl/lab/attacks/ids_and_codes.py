"""What linking gives away: ids that were guessed, codes that are as frequent or as near as keys.

References:
    [VSCR13] Vatsalan et al., A Taxonomy of Privacy-preserving Record Linkage Techniques, 2013,
    section 3.4 (dictionary and frequency attacks).
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.evidence import Evidence, PartyView
from securevfl.lab.attacks.reconstruction import decoder, varying

_KNOWN: Final = 30
"""Records whose keys a reader of codes knows."""

_MOST_RECORDS: Final = 1500
"""Whose codes are read; more are drawn from."""

_GUESSES: Final = 10
"""Made-up ids that a secondary lists, over its own records."""


def _missing(evidence: Evidence) -> str | None:
    if evidence.primary is None or not evidence.secondaries:
        return "needs the views of the primary and of a secondary"
    views = (evidence.primary, *evidence.secondaries.values())
    if not all("link_keys" in view.held for view in views):
        return "parties link by numbers that have no codes, and not by ids or words"
    return None


def _keys(view: PartyView) -> list[str]:
    keys: list[str] = list(view.held["link_keys"])
    return keys


class GuessedIds:
    """A secondary adds made-up ids to its table: links show it which of them the primary has.

    It lists whole numbers between the least and the largest of its own. No protection hinders it:
    all compute what is equal in the tables that parties bring.
    """

    name = "guessed-ids"
    aim: attack.Aim = "links"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        if (why := _missing(evidence)) is not None:
            return why
        assert evidence.primary is not None, "asked before"
        if not all(key.isdecimal() for key in map(_whole, _keys(evidence.primary))):
            return "ids are no whole numbers"
        return None

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:
        """Yield, for each secondary, the share of the primary's other ids that it finds."""
        assert evidence.primary is not None, "asked before"
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
                attack=self.name,
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
    """Return an id as whole numbers are written: those of a table with gaps are read as floats."""
    return key.removesuffix(".0")


class CodeFrequencies:
    """Equal keys have equal codes: the most frequent code is the most frequent key's.

    The coordinator has codes of both sides, and knows how frequent keys are in general; the other
    side's table stands for that. Codes and keys are matched by their ranks.
    """

    name = "code-frequencies"
    aim: attack.Aim = "keys"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        if (why := _missing(evidence)) is not None:
            return why
        assert evidence.primary is not None, "asked before"
        if evidence.config.helper("coordinator") is None:
            return "no coordinator is sent codes"
        keys = _keys(evidence.primary)
        return "no two rows have equal keys" if len(set(keys)) == len(keys) else None

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:  # noqa: ARG002
        """Yield, for each secondary, the share of its records whose key is guessed right."""
        assert evidence.primary is not None, "asked before"
        population = Counter(_keys(evidence.primary))
        ranked = [key for key, _ in population.most_common()]
        coordinator = evidence.config.helper("coordinator")
        assert coordinator is not None, "asked before"
        for view in evidence.secondaries.values():
            keys = _keys(view)
            # A code's own bits are not read: codes are equal or not.
            codes = [code for code, _ in Counter(keys).most_common()]
            guess = dict(zip(codes, ranked, strict=False))
            hits = sum(guess.get(key) == key for key in keys)
            yield attack.Leak(
                attack=self.name,
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


class CodePlaces:
    """Near numbers have near codes: some known keys are enough to read the others off codes."""

    name = "code-places"
    aim: attack.Aim = "keys"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        if evidence.config.linkage.protection != "bloom":
            return "no coordinator is sent codes of numbers"
        if evidence.coordinator is None:
            return "needs the view of a coordinator"
        if not any("own_keys" in secondary.held for secondary in evidence.secondaries.values()):
            return "needs the view of a secondary that links by numbers"
        return None

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:
        """Yield, for each secondary, the share of its keys' variance that is explained."""
        coordinator = evidence.coordinator
        assert coordinator is not None, "asked before"
        codes_of = {line["of"]: line["records"].numpy() for line in coordinator.of("LINK_CODES")}
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
                attack=self.name,
                attacker=coordinator.name,
                about=view.name,
                channel="linkage",
                measure="R2; share of the keys' variance that is explained",
                value=attack.explained_share(wrong, trivial),
                interval=attack.explained_between(wrong, trivial),
                floor=0.0,
                floor_is="the mean of known keys",
                rows=len(wrong),
                known=f"the keys of {_KNOWN} records",
                seeds=seeds,
            )
