"""Each party's part in class means: the sums of one process, and an error for every lie."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.built import Built, built
from helpers.class_means import (
    BINS,
    class_labels,
    fit_as_threads,
    fittings,
    secondary_part,
    write_class_means,
)
from helpers.lines import Wires

from securevfl.core.errors import BudgetExceededError, ConfigError, PrivacyError, ProtocolError
from securevfl.dp.labels import keep_probability
from securevfl.federation.session.peers import HandlerTable, PeersHere
from securevfl.lab.audit.audit_party import ThreadReply
from securevfl.mpc.dealt_sums import DealtFor, SumDealing, deal
from securevfl.stages.class_means.fitting import ClassMeansFitting
from securevfl.stages.class_means.messages import (
    ClassMeansCall,
    ClassMeansDealing,
    ClassMeansDone,
    ClassMeansKind,
    ClassMeansLabels,
    ClassMeansMasked,
    ClassMeansNoise,
    ClassMeansSeed,
    ClassMeansShifted,
    ClassMeansState,
    ClassMeansTurn,
)
from securevfl.stages.class_means.parties import ClassMeansSecondary
from securevfl.transport.channels import Channels
from securevfl.transport.message import Done, StarKind

ROWS, NUMBERS = 120, 4


@pytest.fixture
def one(tmp_path: Path):
    """A run whose class means meet labels under masks, before its first round."""
    with built(write_class_means(tmp_path), tmp_path / "run") as made:
        yield made


def finished(made: Built) -> dict[int, list[np.ndarray]]:
    """Record the sums that each secondary fits its class means to."""
    found: dict[int, list[np.ndarray]] = {}
    for rank, class_means in fittings(made).items():

        def finish(sums, rank=rank, fit=class_means.finish):
            found.setdefault(rank, []).append(sums.copy())
            fit(sums)

        class_means.finish = finish
    return found


def bins_by_rank(made: Built, told) -> dict[int, np.ndarray]:
    return {
        rank: one.format.by_bins(one.vectors(), told.bins_of_rows)
        for rank, one in fittings(made).items()
    }


def test_sums_under_masks_are_the_plain_sums_with_both_noises(one: Built) -> None:
    """Every secondary fits to its class sums, its noise and the primary's, and no label travels."""
    noise = np.arange(BINS * NUMBERS).reshape(BINS, NUMBERS) - 5
    told = class_labels(ROWS, label_noise=lambda sums: np.full(sums.shape, 1000))
    for class_means in fittings(one).values():
        class_means.noise = lambda: noise
    found = finished(one)
    results, wires = fit_as_threads(one, told)
    assert results == {"agency": None, "bank-1": None, "bank-2": None, "dealer": 2}
    for rank, sums in bins_by_rank(one, told).items():
        np.testing.assert_array_equal(found[rank], [sums + noise + 1000])

    kinds = {(by, to): [] for by, to, _ in wires.travelled}
    for by, to, message in wires.travelled:
        kinds[by, to].append(message.kind)
    own = [
        ClassMeansKind.CLASS_MEANS_STATE,
        ClassMeansKind.CLASS_MEANS_NOISE,
        ClassMeansKind.CLASS_MEANS_MASKED,
    ]
    back = [
        ClassMeansKind.CLASS_MEANS_CALL,
        ClassMeansKind.CLASS_MEANS_SHIFTED,
        ClassMeansKind.CLASS_MEANS_SUMS,
    ]
    for name in ("bank-1", "bank-2"):
        assert kinds[name, "agency"] == [*own, ClassMeansKind.CLASS_MEANS_DONE]
        assert kinds["agency", name] == back
        assert kinds["dealer", name] == [ClassMeansKind.CLASS_MEANS_SEED]
        assert (name, "dealer") not in kinds
    assert kinds["agency", "dealer"] == [ClassMeansKind.CLASS_MEANS_TURN] * 2 + [StarKind.DONE]


def test_what_a_secondary_hears_of_labels_is_uniform_and_other_each_time(one: Built) -> None:
    """One class for all rows: what is said takes every value, and differs between secondaries."""
    told = class_labels(ROWS, label_noise=lambda sums: sums.noise(0.0))
    told.bins_of_rows[:] = 2
    _, wires = fit_as_threads(one, told)
    said = [
        message.tensors["said"]
        for _, _, message in wires.travelled
        if message.kind is ClassMeansKind.CLASS_MEANS_SHIFTED
    ]
    # A value is missing among 120 uniform ones of 4 once in 10^14; two such lists are equal once
    # in 10^72.
    assert [set(one.tolist()) for one in said] == [set(range(BINS))] * 2
    assert not np.array_equal(*said)


def test_a_budget_that_forbids_it_lets_nothing_out(one: Built) -> None:
    """Charged before anything leaves: only that class means are not fitted yet was said before."""

    def begin(*, leaves: bool) -> None:
        assert leaves
        raise BudgetExceededError("no room")

    fittings(one)[1].begin = begin
    results, wires = fit_as_threads(
        one, class_labels(ROWS, label_noise=lambda sums: sums.noise(0.0))
    )
    assert isinstance(results["bank-1"], BudgetExceededError)
    sent = [message.kind for by, _, message in wires.travelled if by == "bank-1"]
    assert sent == [ClassMeansKind.CLASS_MEANS_STATE]


def test_label_noise_that_cannot_be_drawn_costs_nobody_anything(one: Built) -> None:
    """No secondary is asked for its sums, which could not be asked for again."""
    charged = {rank: one.booked(rank) for rank in one.secondaries}
    results, wires = fit_as_threads(
        one, class_labels(ROWS, label_noise=lambda sums: sums.noise(1e30))
    )
    assert isinstance(results["agency"], ConfigError)
    assert ClassMeansKind.CLASS_MEANS_TURN not in {m.kind for _, _, m in wires.travelled}
    assert {rank: one.booked(rank) for rank in one.secondaries} == charged


@pytest.mark.parametrize(
    ("labels", "task", "keep"),
    [
        ("plaintext", "multiclass", None),
        ("randomised", "multiclass", keep_probability(2.0, 3)),
    ],
)
def test_labels_that_travel_are_those_of_the_primary(
    labels: str, task: str, keep: float | None, tmp_path: Path
) -> None:
    """Every secondary gets the same bins, and corrects for what the file says of them."""
    path = write_class_means(tmp_path, labels=labels, dealer=False, federation={"task": task})
    told = class_labels(ROWS)
    with built(path, tmp_path / "run") as made:
        expected = {
            rank: one.by_labels(told.bins_of_rows, keep=keep)
            for rank, one in fittings(made).items()
        }
        found = finished(made)
        results, wires = fit_as_threads(made, told)
    assert results == {"agency": None, "bank-1": None, "bank-2": None}
    for rank, sums in expected.items():
        np.testing.assert_array_equal(found[rank], [sums])
    sent = [
        m.tensors["bins"]
        for _, _, m in wires.travelled
        if m.kind is ClassMeansKind.CLASS_MEANS_LABELS
    ]
    assert len(sent) == 2
    for bins in sent:
        np.testing.assert_array_equal(bins, told.bins_of_rows)


def test_class_means_that_are_fitted_are_left_alone(one: Built, monkeypatch) -> None:
    """A resumed run: who has fitted says so, and is neither charged, summed nor sent labels."""
    monkeypatch.setattr(ClassMeansFitting, "encoder_fixed", True)
    charged = {rank: one.booked(rank) for rank in one.secondaries}
    results, wires = fit_as_threads(
        one, class_labels(ROWS, label_noise=lambda sums: sums.noise(0.0))
    )
    assert results == {"agency": None, "bank-1": None, "bank-2": None, "dealer": 0}
    assert {m.kind for _, _, m in wires.travelled} == {
        ClassMeansKind.CLASS_MEANS_CALL,
        ClassMeansKind.CLASS_MEANS_STATE,
        StarKind.DONE,
    }
    assert {rank: one.booked(rank) for rank in one.secondaries} == charged


class TestLies:
    """Each ends with one line that names who said what."""

    def quiet(self):
        return class_labels(ROWS, label_noise=lambda sums: sums.noise(0.0))

    def of_primary(self, one: Built, tell) -> Exception:
        """Return what the first secondary makes of a primary's messages after the call."""

        def primary(wires) -> None:
            lines = wires.of("agency")
            lines.send(ClassMeansCall().to_message(), "bank-1")
            tell(lines)

        def nothing(_wires) -> None:
            pass

        instead = {"agency": primary, "bank-2": nothing}
        results, _ = fit_as_threads(one, self.quiet(), instead=instead)
        return results["bank-1"]

    @pytest.mark.parametrize("lie", [BINS, -1])
    def test_a_shift_out_of_range_is_refused_before_the_charge(self, one: Built, lie) -> None:
        before = one.booked(1)

        def tell(lines: Channels) -> None:
            lines.send(ClassMeansTurn(secondary=1, numbers=NUMBERS).to_message(), "dealer")
            said = np.zeros(ROWS, dtype=np.int64)
            said[3] = lie
            lines.send(ClassMeansShifted(said=said).to_message(), "bank-1")
            lines.send(Done().to_message(), "dealer")

        error = self.of_primary(one, tell)
        assert isinstance(error, ProtocolError)
        assert str(error).startswith(
            "agency: CLASS_MEANS_SHIFTED of round 0: said must lie in 0 to 3"
        )
        assert one.booked(1) == before

    def test_a_shift_too_few_is_refused(self, one: Built) -> None:
        def tell(lines: Channels) -> None:
            said = np.zeros(ROWS - 1, dtype=np.int64)
            lines.send(ClassMeansShifted(said=said).to_message(), "bank-1")
            lines.send(Done().to_message(), "dealer")

        error = self.of_primary(one, tell)
        assert "said must have shape [120], got [119]" in str(error)

    def test_a_second_call_is_refused(self, one: Built) -> None:
        told = self.quiet()
        results: list[Exception] = []

        def bank(wires: Wires) -> None:
            lines = wires.of("bank-1")
            part = secondary_part(one, 1, lines)
            table = HandlerTable(part.beside_rounds)
            call = table.read(lines.receive("agency", *table.kinds))
            reply = ThreadReply(lines, "agency")
            table.handle(call, reply)
            with pytest.raises(
                ProtocolError, match="calls for class means twice in one session"
            ) as told:
                table.handle(call, reply)
            results.append(told.value)

        fit_as_threads(one, told, instead={"bank-1": bank})
        assert len(results) == 1

    @pytest.mark.parametrize("called", [False, True])
    def test_labels_that_no_encoder_waits_for_are_refused(
        self, called: bool, tmp_path: Path, monkeypatch
    ) -> None:
        """Before the call, and after it where the encoder is fitted: nothing is charged."""
        monkeypatch.setattr(ClassMeansFitting, "encoder_fixed", True)
        (tmp_path / "plain").mkdir()
        path = write_class_means(tmp_path / "plain", labels="plaintext", dealer=False)
        with built(path, tmp_path / "plain" / "run") as made:
            part = ClassMeansSecondary(made.plan, fittings(made)[1])
            peers = PeersHere({1: part.beside_rounds})
            before = made.booked(1)
            if called:
                (state,) = peers.ask(ClassMeansCall(), ClassMeansState)
                assert state.settled
            labels = ClassMeansLabels(bins_of_rows=class_labels(ROWS).bins_of_rows)
            with pytest.raises(ProtocolError, match="CLASS_MEANS_LABELS: no class means wait"):
                peers.ask(labels, ClassMeansDone)
            assert made.booked(1) == before

    def test_rows_before_class_means_are_refused(self, one: Built) -> None:
        """A primary that leaves class means out gets no row of an encoder that is only drawn."""
        with pytest.raises(PrivacyError, match="before it has let their encoder be fitted"):
            one.answer(one.passed()[0])
        fittings(one)
        with pytest.raises(PrivacyError, match="before it has let class means be fitted"):
            one.answer(one.passed()[1])

    @pytest.mark.parametrize(
        ("turns", "line"),
        [
            ([(1, 4), (1, 4)], "agency: CLASS_MEANS_TURN of round 0: secondary = 1 is not due"),
            ([(3, 4)], "agency: CLASS_MEANS_TURN of round 0: secondary = 3 is not due"),
            ([(0, 4)], "agency: CLASS_MEANS_TURN of round 0: secondary = 0 is not due"),
            (
                [(1, 10**9)],
                "agency: CLASS_MEANS_TURN of round 0: numbers must be at least 2 ",
            ),
            (
                [(1, 1)],
                "agency: CLASS_MEANS_TURN of round 0: numbers must be at least 2 ",
            ),
        ],
    )
    def test_a_dealer_deals_once_for_each_secondary(self, one: Built, turns, line) -> None:
        def primary(wires) -> None:
            for rank, numbers in turns:
                turn = ClassMeansTurn(secondary=rank, numbers=numbers)
                wires.of("agency").send(turn.to_message(), "dealer")

        def nothing(_wires) -> None:
            pass

        instead = {"agency": primary, "bank-1": nothing, "bank-2": nothing}
        results, _ = fit_as_threads(one, self.quiet(), instead=instead)
        assert isinstance(results["dealer"], ProtocolError)
        assert str(results["dealer"]).startswith(line)

    @pytest.mark.parametrize(
        ("shape", "shift", "line"),
        [
            ((ROWS, BINS, NUMBERS - 1), 0, r"correction must have shape \[4, 4\], got \[4, 3\]"),
            ((ROWS + 1, BINS, NUMBERS), 0, r"shifts must have shape \[120\], got \[121\]"),
            (
                (ROWS, BINS, NUMBERS),
                BINS,
                "CLASS_MEANS_DEALING of round 0: shifts must lie in 0 to 3",
            ),
        ],
    )
    def test_a_strangers_dealing_is_refused(self, one: Built, shape, shift, line) -> None:
        """Masks of other sums, of other rows, or shifts that are none: nobody's sum comes of it."""

        def dealer(wires) -> None:
            lines = wires.of("dealer")
            lines.receive("agency", ClassMeansKind.CLASS_MEANS_TURN)
            sizes = dict(zip(("rows", "bins", "numbers"), shape, strict=True))
            dealt = DealtFor(run=one.plan.facts.run, secondary=1, **sizes)
            dealing, seed = deal(dealt)
            dealing = SumDealing(shifts=dealing.shifts + shift, correction=dealing.correction)
            # The secondary is told what it has itself, so that the primary must notice.
            own = DealtFor(
                run=one.plan.facts.run, secondary=1, rows=ROWS, bins=BINS, numbers=NUMBERS
            )
            lines.send(ClassMeansSeed(seed=seed, what=own).to_message(), "bank-1")
            lines.send(
                ClassMeansDealing(
                    shifts=dealing.shifts, correction=dealing.correction
                ).to_message(),
                "agency",
            )

        results, _ = fit_as_threads(one, self.quiet(), instead={"dealer": dealer})
        with pytest.raises(ProtocolError, match=line):
            raise results["agency"]

    def test_a_dealer_that_was_told_other_numbers_gets_no_sums(self, one: Built) -> None:
        """The primary asks for masks of half as many numbers: the secondary sends nothing."""

        def dealer(wires) -> None:
            lines = wires.of("dealer")
            lines.receive("agency", ClassMeansKind.CLASS_MEANS_TURN)
            told = DealtFor(
                run=one.plan.facts.run, secondary=1, rows=ROWS, bins=BINS, numbers=NUMBERS // 2
            )
            _, seed = deal(told)
            # The primary has altered itself to take whatever dealing it likes.
            dealing, _ = deal(replace(told, numbers=NUMBERS))
            lines.send(ClassMeansSeed(seed=seed, what=told).to_message(), "bank-1")
            lines.send(
                ClassMeansDealing(
                    shifts=dealing.shifts, correction=dealing.correction
                ).to_message(),
                "agency",
            )

        results, _ = fit_as_threads(one, self.quiet(), instead={"dealer": dealer})
        with pytest.raises(ProtocolError, match=r"numbers = 2, as the primary asked.*no sums"):
            raise results["bank-1"]

    @pytest.mark.parametrize(
        ("rows", "numbers", "line"),
        [
            (ROWS - 1, NUMBERS, r"words must have shape \[120, 4, 4\], got \[119, 4, 4\]"),
            (ROWS, NUMBERS + 1, r"words must have shape \[4, 4\], got \[4, 5\]"),
        ],
    )
    def test_a_secondary_answers_for_every_row_once(self, one: Built, rows, numbers, line) -> None:
        def bank(wires) -> None:
            lines = wires.of("bank-1")
            lines.send(
                ClassMeansState(settled=False, numbers=NUMBERS, columns=1).to_message(), "agency"
            )
            lines.receive("agency", ClassMeansKind.CLASS_MEANS_CALL)
            lines.receive("agency", ClassMeansKind.CLASS_MEANS_SHIFTED)
            noise = ClassMeansNoise(words=np.zeros((BINS, numbers), np.uint64))
            lines.send(noise.to_message(), "agency")
            masked = ClassMeansMasked(words=np.zeros((rows, BINS, numbers), np.uint64))
            lines.send(masked.to_message(), "agency")

        results, _ = fit_as_threads(one, self.quiet(), instead={"bank-1": bank})
        with pytest.raises(ProtocolError, match=line):
            raise results["agency"]
