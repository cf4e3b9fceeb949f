"""The audit passes class sums, drawn labels and symbols of the installed code, fails altered ones.

False alarm: each of its 10 tests fails the right mechanism with probability at most 3.2e-11, but
the two of symbols, one with twice that and one never. Miss:
noise and labels of altered mechanisms are the same in every run of these tests, which therefore
never miss by chance; what chance there would be is stated beside each.
"""

import math
import os
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from securevfl.dp import symbols
from securevfl.dp.class_sums import SumFormat, integer_records
from securevfl.dp.labels import randomised_labels
from securevfl.dp.symbols import SymbolNoise
from securevfl.lab.audit.audit_class_means import audit_class_means, least_loss
from securevfl.lab.audit.audit_statistics import AuditSettings
from securevfl.mpc import dealt_sums
from securevfl.mpc.dealt_sums import masked_noise, open_sums
from securevfl.stages.class_means import class_labels, parties
from securevfl.stages.class_means.fitting import ClassMeansFitting
from securevfl.stages.class_means.messages import ClassMeansSums

pytestmark = pytest.mark.statistical

# As few sums as there are: little noise is told apart soon.
FEW = AuditSettings(secondaries=1, noise_multiplier=0.5, label_epsilon=8.0)

Patch = pytest.MonkeyPatch


def failed(settings: AuditSettings) -> set[str]:
    """Return the tests that fail."""
    tests = [test for kind in audit_class_means(settings).values() for test in kind]
    return {test.name for test in tests if test.verdict == "fail"}


@pytest.mark.parametrize("settings", [FEW, AuditSettings()], ids=["little noise", "default"])
def test_what_is_installed_passes(settings: AuditSettings) -> None:
    """False alarm 4e-10; every power is 0.999 or more."""
    found = audit_class_means(settings)
    tests = [test for kind in found.values() for test in kind]

    assert [test.name for test in tests if test.verdict == "fail"] == []
    assert [len(kind) for kind in found.values()] == [3, 3, 2, 2]
    assert min(test.power for test in tests) > 0.999
    assert len({test.name for test in tests}) == 10


def test_the_power_stated_for_symbols_is_had() -> None:
    """Twice the loss is found if both counts are where 1 in 10,000 runs has them, or nearer."""
    test = audit_class_means(FEW)["symbols"][0]
    assert test.power == 1 - 2e-4
    # 5 cells at epsilon 2: p of the odds with twice the loss that is charged.
    own = 1 / (1 + 4 / (5 * math.exp(2 * test.threshold) - 4))
    there = int(stats.binom.ppf(1e-4, 1024, own))
    absent = int(stats.binom.isf(1e-4, 1024, 1 / 5))
    assert least_loss(there, absent, 1024) > test.threshold


def half_of_a_record(patch: Patch) -> None:
    """A secondary's noise is half of what is charged."""
    whole = ClassMeansFitting.noise
    patch.setattr(ClassMeansFitting, "noise", lambda self: whole(self) // 2)


def one_link_a_record(patch: Patch) -> None:
    """Noise is made for a record that is in one row; it is in two."""
    patch.setattr(SumFormat, "change_of_record", property(lambda self: self.longest))


def rows_as_long_as_they_are(patch: Patch) -> None:
    """A row of two records counts twice, so its label moves sums by twice as much."""

    def vectors(self: SumFormat, records: np.ndarray, links: np.ndarray) -> np.ndarray:
        units = integer_records(records, radius=self.radius, bits=self.bits)
        return sum(units[slot] * (slot >= 0)[:, None] for slot in links.T).astype(np.int64)

    patch.setattr(SumFormat, "row_vectors", vectors)


def nothing_behind_masks(patch: Patch) -> None:
    """Masked noise is a mask alone."""
    patch.setattr(dealt_sums, "masked_noise", lambda noise, *more: masked_noise(0 * noise, *more))


def nothing_by_labels(patch: Patch) -> None:
    """Sums by labels that were sent have no noise."""

    def bare(self: ClassMeansFitting, bins: np.ndarray, *, keep: float | None) -> np.ndarray:
        del keep
        return self.format.by_bins(self.vectors(), bins).astype(np.float64)

    patch.setattr(ClassMeansFitting, "by_labels", bare)


def half_of_a_label(patch: Patch) -> None:
    """The primary's noise is half of what it promises."""
    whole = class_labels.gaussian_noise_multiplier
    patch.setattr(class_labels, "gaussian_noise_multiplier", lambda **promise: whole(**promise) / 2)


def one_line_a_label(patch: Patch) -> None:
    """Noise is made for a label that changes one line of the sums; it changes two."""
    patch.setattr(SumFormat, "change_of_label", lambda self, _rows_moved: self.longest)


def labels_without_noise(patch: Patch) -> None:
    """The primary returns the sums as it has opened them."""
    kept: list[np.ndarray] = []

    def heard(*arguments: object) -> np.ndarray:
        kept.append(open_sums(*arguments))
        return kept[-1]

    class Bare(ClassMeansSums):
        from_message = staticmethod(ClassMeansSums.from_message)

        def __new__(cls, *, sums: np.ndarray) -> ClassMeansSums:
            del sums
            return ClassMeansSums(sums=kept[-1])

    patch.setattr(dealt_sums, "open_sums", heard)
    patch.setattr(parties, "ClassMeansSums", Bare)


def noise_again(patch: Patch) -> None:
    """Whoever asks for noise of one deviation again gets the same."""
    drawn: dict[float, np.ndarray] = {}
    fresh = SumFormat.noise

    def noise(self: SumFormat, std: float) -> np.ndarray:
        return drawn.setdefault(std, fresh(self, std))

    patch.setattr(SumFormat, "noise", noise)


def labels_kept_too_often(patch: Patch) -> None:
    """At twice the epsilon."""
    patch.setattr(
        class_labels,
        "randomised_labels",
        lambda bins, classes, epsilon: randomised_labels(bins, classes, 2 * epsilon),
    )


def labels_drawn_again(patch: Patch) -> None:
    """In every session of the run."""
    patch.setattr(class_labels, "drawn_once", lambda _files, _rows, draw: draw())


def at_twice_the_epsilon(patch: Patch) -> None:
    """Own cells are kept as often as twice the epsilon allows."""
    exact = symbols.turn_classes
    patch.setattr(
        symbols,
        "turn_classes",
        lambda cells, count, epsilon, words: exact(cells, count, 2 * epsilon, words),
    )


def absent_in_one_cell(patch: Patch) -> None:
    """Rows without a record are as if one were in the first cell."""
    exact = SymbolNoise.cells_of
    patch.setattr(
        SymbolNoise, "cells_of", lambda noise, values: np.maximum(exact(noise, values), 0)
    )


def a_draw_for_each_row(patch: Patch) -> None:
    """Rows of a key share no draw."""
    exact = SymbolNoise.draw

    def draw(
        noise: SymbolNoise, cells: np.ndarray, keys: np.ndarray, *, secret: bytes
    ) -> np.ndarray:
        return exact(noise, cells, np.arange(len(keys)), secret=secret)

    patch.setattr(SymbolNoise, "draw", draw)


def absent_rows_draw_again(patch: Patch) -> None:
    """A row without a record draws its symbol whenever it is asked for."""
    drawn = SymbolNoise.draw

    def draw(
        noise: SymbolNoise, cells: np.ndarray, keys: np.ndarray, *, secret: bytes
    ) -> np.ndarray:
        fresh = drawn(noise, cells, np.arange(len(keys)), secret=os.urandom(32))
        return np.where(cells < 0, fresh, drawn(noise, cells, keys, secret=secret))

    patch.setattr(SymbolNoise, "draw", draw)


RECORD = {"record_noise_not_too_small", "records_not_too_distinguishable"}
LABEL = {"label_noise_not_too_small", "labels_not_too_distinguishable"}


@pytest.mark.parametrize(
    ("alter", "caught_by"),
    [
        # A quarter of the variance (below 1e-9), and told apart too well (1e-4).
        (half_of_a_record, RECORD),
        (one_link_a_record, RECORD),
        # Two worlds twice as far from one another as they may be: 1e-4.
        (rows_as_long_as_they_are, {"labels_not_too_distinguishable"}),
        # Half of the sums have noise: their variance is half, below 1e-9.
        (nothing_behind_masks, {"record_noise_not_too_small"}),
        (nothing_by_labels, {"record_noise_not_too_small"}),
        (half_of_a_label, LABEL),
        # Half of the variance: below 1e-9.
        (one_line_a_label, {"label_noise_not_too_small"}),
        (labels_without_noise, LABEL),
        # Correlations of 1.
        (noise_again, {"record_sums_have_own_noise", "label_sums_have_own_noise"}),
        # 2e-4.
        (labels_kept_too_often, {"drawn_not_too_distinguishable"}),
        # Below 1e-9: one row that differs is enough.
        (labels_drawn_again, {"drawn_told_again_alike"}),
        # 2e-4.
        (at_twice_the_epsilon, {"symbols_not_too_distinguishable"}),
        # 1 in 5 for any other cell with a record, never without one: below 1e-9.
        (absent_in_one_cell, {"symbols_not_too_distinguishable"}),
        # 1 in 5 for each of a thousand keys.
        (a_draw_for_each_row, {"rows_of_a_key_have_one_symbol"}),
        (absent_rows_draw_again, {"rows_of_a_key_have_one_symbol"}),
    ],
)
@pytest.mark.usefixtures("fixed_noise")
def test_what_is_altered_fails(
    alter: Callable[[Patch], None], caught_by: set[str], monkeypatch: Patch
) -> None:
    """By the tests that are there for it, and by no test of what was left alone."""
    alter(monkeypatch)
    found = failed(FEW)

    assert caught_by <= found
    of_records = any(name.startswith("record") for name in caught_by)
    of_symbols = any("symbol" in name for name in caught_by)
    assert {name for name in found if "symbol" in name} == (caught_by if of_symbols else set())
    of_drawn = any(name.startswith("drawn") for name in caught_by)
    assert of_drawn == any(name.startswith("drawn") for name in found)
    if not of_records:
        assert not any(name.startswith("record") for name in found)
