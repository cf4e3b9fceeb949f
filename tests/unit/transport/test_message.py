import numpy as np
import pytest

from securevfl.core.errors import ProtocolError
from securevfl.desk.setup.kit import CheckKind
from securevfl.federation.messages import RoundKind
from securevfl.ledger.countersigning import LedgerKind
from securevfl.linkage.stage.messages import LinkingKind
from securevfl.stages.bloom.by_codes import CodeKind
from securevfl.stages.class_means.messages import ClassMeansKind
from securevfl.stages.encrypted_linkage.blockwise import BlockKind
from securevfl.stages.pretraining.messages import PretrainingKind
from securevfl.stages.programs.messages import ComputingKind
from securevfl.stages.psi.psi import PsiKind
from securevfl.transport.message import Message, MessageKind, StarKind, kind_of

SHARE = Message(
    kind=RoundKind.SHARE,
    round_number=7,
    meta={"count": 3, "flag": True, "text": "x"},
    tensors={"words": np.arange(6, dtype=np.int64).reshape(2, 3), "bad": np.array([1.0, np.nan])},
    sender="rental",
)

KINDS = (
    *(StarKind, RoundKind, LedgerKind, LinkingKind, PretrainingKind, ClassMeansKind),
    *(CheckKind, ComputingKind, CodeKind, BlockKind, PsiKind),
)


def test_an_array_that_was_agreed_on_is_handed_out():
    """Exact type and shape pass; None stands for any length."""
    assert SHARE.tensor("words", dtype="int64", shape=(2, 3)).sum() == 15
    assert SHARE.tensor("words", dtype=np.int64, shape=(None, 3)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "text"),
    [
        ("words", "int32", (2, 3), "words must be int32, got int64"),
        ("words", "int64", (3, 2), r"words must have shape \[3, 2\], got \[2, 3\]"),
        ("words", "int64", (6,), r"words must have shape \[6\], got \[2, 3\]"),
        ("words", "int64", (None, None, 1), r"words must have shape \[any, any, 1\]"),
        ("mask", "int64", (2,), r"has no array 'mask', only \['bad', 'words'\]"),
        ("bad", "float64", (2,), "bad holds a value that is NaN or infinite"),
    ],
)
def test_any_other_array_is_refused_with_who_what_and_got(name, dtype, shape, text):
    """The message names the sender, the round, what was wanted and what came."""
    with pytest.raises(ProtocolError, match=f"rental: SHARE of round 7: {text}"):
        SHARE.tensor(name, dtype=dtype, shape=shape)


def test_values_that_are_not_finite_can_be_asked_for():
    """The check for NaN can be switched off by the one who wants to look."""
    assert np.isnan(SHARE.tensor("bad", dtype="float64", shape=(2,), finite=False)[1])


@pytest.mark.parametrize(("name", "kind"), [("count", str), ("flag", int), ("none", int)])
def test_a_figure_of_another_type_is_refused(name, kind):
    """A bool is no number, and a missing figure is no figure."""
    assert SHARE.figure("count", int) == 3
    assert SHARE.figure("flag", bool) is True
    with pytest.raises(ProtocolError, match=f"rental: SHARE of round 7: {name} must be"):
        SHARE.figure(name, kind)


def test_repr_shows_sizes_only():
    """What a message holds never gets into a log by its text form."""
    text = repr(SHARE)
    assert text == "<SHARE round 7 from rental: words int64[2, 3], bad float64[2]>"


def test_kind_codes_never_change():
    """Codes are part of the protocol: parties of different releases must mean the same."""
    kinds = [kind for package in KINDS for kind in package]
    assert set(MessageKind.__subclasses__()) == set(KINDS)
    assert {kind.name: kind.value for kind in kinds} == {
        "SESSION": 1, "PING": 2, "ABORT": 3, "LEAVE": 4, "HELLO": 5, "WELCOME": 6,
        "LINK_KEYS": 7, "LINKED": 8, "PLAN": 9, "SHARE": 10, "GRADIENT": 11, "AVERAGE": 12,
        "MEAN": 13, "EPOCH": 14, "DONE": 15, "READY": 16,
        "MEMORIES": 17, "HEADS": 18, "COUNTERSIGN": 19,
        "SEALED": 20, "LINK_CODES": 21, "LINK_TURN": 22, "LINK_DEALING": 23, "LINK_MASKED": 24,
        "LINK_SHARE": 25, "LINK_CIPHERS": 26, "LINK_LISTS": 27, "SIMILARITIES": 28,
            "LINK_CELLS": 29, "LINK_BLOCK": 30, "LINKED_ROWS": 31,
        "PRETRAIN": 32, "CROSS": 33, "PROJECTIONS": 34, "LOCAL": 35, "TOPS": 36,
        "PRETRAINED": 37, "TRAINING_ROWS": 38, "PREDICT": 39,
        "CLASS_MEANS_CALL": 43, "CLASS_MEANS_STATE": 44,
        "CLASS_MEANS_LABELS": 45, "CLASS_MEANS_TURN": 46,
        "CLASS_MEANS_DEALING": 47, "CLASS_MEANS_SEED": 48,
        "CLASS_MEANS_SHIFTED": 49, "CLASS_MEANS_NOISE": 50,
        "CLASS_MEANS_MASKED": 51, "CLASS_MEANS_SUMS": 52,
        "CLASS_MEANS_DONE": 53,
        "COMPUTING_KEY": 55, "COMPUTING_SEED": 56, "COMPUTING_TENSOR": 57,
        "COMPUTING_REQUEST": 58, "COMPUTING_DEALING": 59, "COMPUTING_DONE": 60,
        "COMPUTING_BEGIN": 61, "LINK_POINTS": 62, "PEER_FACTS": 63,
        "LINK_COUNT_REQUEST": 64, "LINK_COUNT": 65,
    }  # fmt: skip


def test_a_code_belongs_to_one_kind():
    """Two packages that took one code would read each other's messages."""
    with pytest.raises(ValueError, match="its code is that of"):
        MessageKind("TakenKind", {"ANYTHING": RoundKind.SHARE.value})
    assert kind_of(10) is RoundKind.SHARE
    with pytest.raises(ValueError, match="no message of kind 99"):
        kind_of(99)
