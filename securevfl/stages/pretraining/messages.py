"""Messages of pretraining, each checked where it is read."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float32, Int64

from securevfl.transport.message import DeclaredMessage, MessageKind, wire


class PretrainingKind(MessageKind):
    """Kinds of messages of pretraining."""

    PRETRAIN = 32
    CROSS = 33
    PROJECTIONS = 34
    LOCAL = 35
    TOPS = 36
    PRETRAINED = 37


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IterationBegin(DeclaredMessage):
    """An iteration of pretraining begins.

    It names the primary's rows that are held out for validation and testing.
    """

    KIND: ClassVar = PretrainingKind.PRETRAIN
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {
        "no record": "iteration lengths",
        "pretraining, from the primary": "held_out",
    }

    iteration: int
    """Counts from 0."""

    held_out: Int64[np.ndarray, " _rows"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CrossBatch(DeclaredMessage):
    """Row ids of a batch and the primary's projections of them.

    The projections carry the noise that ``pretraining.primary_sends`` or ``iso_projections`` asks
    for.
    """

    KIND: ClassVar = PretrainingKind.CROSS
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {
        "no record": "round_number",
        "pretraining, from the primary": "rows sent lengths",
    }

    round_number: int
    rows: Int64[np.ndarray, " some_rows"]
    sent: Float32[np.ndarray, "some_rows width"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Projections(DeclaredMessage):
    """The secondary's projections of the batch in clear.

    Only in a plain exchange; in an averaged one the secondary sends a share.
    """

    KIND: ClassVar = PretrainingKind.PROJECTIONS
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {
        "no record": "round_number lengths",
        "pretraining, to the primary": "vectors",
    }

    round_number: int
    vectors: Float32[np.ndarray, "*shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnLocally(DeclaredMessage):
    """Learn from your own records."""

    KIND: ClassVar = PretrainingKind.LOCAL
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "iteration lengths"}

    iteration: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TopsRequest(DeclaredMessage):
    """Send your local top encoder's words."""

    KIND: ClassVar = PretrainingKind.TOPS
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "round_number lengths"}

    round_number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationEnd(DeclaredMessage):
    """So many iterations are done, and whether it was the last."""

    KIND: ClassVar = PretrainingKind.PRETRAINED
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "iterations last lengths"}

    iterations: int = wire(least=1)
    last: bool
