"""Messages of the class-means stage refuse values that no reader could rely on."""

from dataclasses import replace

import numpy as np
import pytest

from securevfl.core.errors import ProtocolError
from securevfl.mpc.dealt_sums import DealtFor, deal, rows_of_piece
from securevfl.stages.class_means.messages import (
    ClassMeansDealing,
    ClassMeansLabels,
    ClassMeansMasked,
    ClassMeansSeed,
    ClassMeansShifted,
    ClassMeansState,
)
from securevfl.transport.message import Message

ROWS, BINS, NUMBERS = 5, 3, 2
EACH_ROW = np.array([0, 1, 2, 2, 0])
WHAT = DealtFor(run="a run", secondary=2, rows=ROWS, bins=BINS, numbers=NUMBERS)
DEALING, SEED = deal(WHAT)

CASES = {
    "labels": (ClassMeansLabels(bins_of_rows=EACH_ROW), {"rows": ROWS, "bins": BINS}),
    "dealing": (
        ClassMeansDealing(shifts=DEALING.shifts, correction=DEALING.correction),
        {"rows": ROWS, "bins": BINS, "numbers": NUMBERS},
    ),
    "shifted": (ClassMeansShifted(said=EACH_ROW), {"rows": ROWS, "bins": BINS}),
}


def wire(message: Message) -> Message:
    """Return it as the star hands it out."""
    return replace(
        message, sender="bank", tensors={k: v.copy() for k, v in message.tensors.items()}
    )


@pytest.mark.parametrize("name", ["labels", "dealing", "shifted"])
@pytest.mark.parametrize("value", [BINS, -1, 2**62])
def test_numbers_that_name_no_bin_are_refused(name: str, value: int) -> None:
    """An index out of range would reach another row's memory, or count from the end."""
    sent, context = CASES[name]
    message = wire(sent.to_message())
    for_rows = next(array for array in message.tensors.values() if array.shape == (ROWS,))
    for_rows[1] = value
    said = r"bank: CLASS_MEANS_\w+ of round 0: \w+ must lie in 0 to 2"
    with pytest.raises(ProtocolError, match=said):
        type(sent).from_message(message, **context)


@pytest.mark.parametrize(
    "meta", [{"numbers": 4098}, {"numbers": 1}, {"numbers": True}, {"settled": 1}]
)
def test_a_state_that_cannot_be_is_refused(meta) -> None:
    """Class sums have up to 4,097 numbers; what is no number or no truth value is nothing."""
    state = ClassMeansState(settled=False, numbers=61, columns=60).to_message()
    ClassMeansState.from_message(wire(state))
    with pytest.raises(ProtocolError, match="bank"):
        ClassMeansState.from_message(wire(replace(state, meta={**state.meta, **meta})))


def test_masked_vectors_come_in_pieces_that_both_sides_know() -> None:
    """The last piece has what is left; any other is as large as its reader reckons."""
    most = rows_of_piece(1000, 60)
    assert most == 34
    words = np.zeros((most, 1000, 60), dtype=np.uint64)
    shape = {"bins": 1000, "numbers": 60}
    ClassMeansMasked.from_message(
        wire(ClassMeansMasked(words=words).to_message()), rows=most, **shape
    )
    with pytest.raises(ProtocolError, match=r"words must have shape \[34, 1000, 60\]"):
        ClassMeansMasked.from_message(
            wire(ClassMeansMasked(words=words[:-1]).to_message()), rows=most, **shape
        )


def test_no_secret_is_in_a_text_form() -> None:
    """Seeds and labels stay out of logs."""
    assert repr(ClassMeansSeed(seed=b"s" * 32, what=WHAT)) == f"ClassMeansSeed(what={WHAT!r})"
    assert repr(ClassMeansLabels(bins_of_rows=EACH_ROW)) == "ClassMeansLabels()"


@pytest.mark.parametrize(
    ("name", "value"),
    [("run", "another"), ("secondary", 1), ("rows", 6), ("bins", 2), ("numbers", 3)],
)
def test_a_seed_of_other_sums_is_refused(name: str, value: str | int) -> None:
    """What the dealer was told by the primary must be what this party has itself."""
    dealt = replace(WHAT, **{name: value})
    message = wire(ClassMeansSeed(seed=SEED, what=dealt).to_message())
    with pytest.raises(ProtocolError, match=f"bank: dealt masks .* with {name} = .*as the primary"):
        ClassMeansSeed.from_message(message, what=WHAT)
