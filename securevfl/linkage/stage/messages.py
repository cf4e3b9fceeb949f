"""Messages of the linking stage that several protections use.

Messages of one protection, and their kinds, are in its module.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float32, Int64

from securevfl.core.errors import ProtocolError
from securevfl.linkage.links import NO_RECORD, LinkTable
from securevfl.linkage.sampling import EligiblePairs, most_pairs
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.candidates import Candidates, ranked_length
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, TypedMessage, wire


class LinkingKind(MessageKind):
    """Kinds of message that several protections of keys use."""

    LINK_KEYS = 7
    """Primary to every secondary: its key columns with their mean and deviation, as the linkage
    protection ``none`` allows."""

    LINKED = 8
    """Secondary to primary: linkage is done; for families that read them, noised similarities of
    every row's links, in falling order and without record numbers."""

    LINK_LISTS = 27
    """Coordinator to a secondary: for each primary row, record numbers in order of distance."""

    SIMILARITIES = 28
    """Coordinator to primary: one secondary's noised similarities in falling order, without
    record numbers."""

    LINKED_ROWS = 31
    """Secondary to primary: which rows have a link, where only aligned rows are learned from."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Linked(DeclaredMessage):
    """That linkage is done at the sender."""

    KIND = LinkingKind.LINKED
    WAY = "secondary to primary"
    COVERS: ClassVar = {"no record": "lengths"}


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class OwnSimilarities(DeclaredMessage):
    """That linkage is done at the sender, and noised similarities of its links in falling order."""

    KIND = LinkingKind.LINKED
    WAY = "secondary to primary"
    COVERS: ClassVar = {"similarities": "similarities", "no record": "lengths"}

    similarities: Float32[np.ndarray, "rows neighbours"] = wire(gaps=True)
    """NaN where a slot holds no record."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LinkedRows(DeclaredMessage):
    """For each of the primary's rows, whether it has a link at the sender.

    Only in cross-party pretraining and with ``training.rows = "aligned"``. Without
    ``linkage.max_distance`` also whether some row's nearest record has another key than the row.
    """

    KIND = LinkingKind.LINKED_ROWS
    WAY = "secondary to primary"
    COVERS: ClassVar = {"aligned rows": "rows apart lengths"}

    rows: Bool[np.ndarray, " rows"]
    """Presence of a link for each row."""

    apart: bool
    """Presence of a row as in :attr:`securevfl.linkage.spec.LinkedSecondary.apart`."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MadeSimilarities(DeclaredMessage):
    """One secondary's noised similarities in falling order, without record numbers."""

    KIND = LinkingKind.SIMILARITIES
    WAY = "coordinator to primary"
    COVERS: ClassVar = {"similarities": "similarities", "no record": "lengths"}

    similarities: Float32[np.ndarray, "rows neighbours"] = wire(gaps=True)
    """NaN where a slot holds no record."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Lists(TypedMessage):
    """For each primary row, record numbers in order of distance.

    Where secondaries report which rows are linked, and ``linkage.max_distance`` is not set, also
    whether some row's nearest record has another key than the row.
    """

    KIND = LinkingKind.LINK_LISTS
    WAY = "coordinator to a secondary"
    COVERS: ClassVar = {"linkage": "candidates apart", "sizes and times": "most lengths"}

    candidates: Candidates
    """Records in order; distances are not sent, and received ones have places instead."""

    apart: bool
    """True if some row's first record has another key than the row
    (:func:`securevfl.linkage.stage.candidates.tells_apart`)."""

    most: int
    """The largest number of pairs, :func:`securevfl.linkage.sampling.most_pairs`; unused
    where candidates are lists of one length."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        candidates = self.candidates
        if isinstance(candidates, LinkTable):
            tensors = {"indices": candidates.indices}
        else:
            # Padded: the primary passes the sealed message on, and its length would show how many
            # records lie near the rows.
            records = np.full(self.most, NO_RECORD, dtype=np.int64)
            records[: len(candidates.records)] = candidates.records
            tensors = {"starts": candidates.starts, "records": records}
        return Message(kind=self.KIND, meta={"apart": self.apart}, tensors=tensors)

    @classmethod
    def from_message(cls, message: Message, *, spec: LinkSpec, rows: int, records: int) -> "Lists":
        """Check received lists.

        Raises:
            ProtocolError: If they are not what was agreed on.
        """
        apart = message.figure("apart", bool)
        pairs_due = spec.choice.links_per_record is not None and not spec.choice.is_fixed
        most = most_pairs(rows=rows, records=records, cap=spec.choice.links_per_record)
        message.require_only("apart", *(("starts", "records") if pairs_due else ("indices",)))
        if pairs_due:
            starts = message.tensor("starts", dtype=np.int64, shape=(rows + 1,))
            numbers = message.tensor("records", dtype=np.int64, shape=(most,))
            if starts[0] != 0 or starts[-1] > most or (np.diff(starts) < 0).any():
                raise ProtocolError(f"{message.sender}: sent pairs that do not add up")
            numbers = numbers[: starts[-1]]
            require_numbers(message, numbers, below=records)
            pairs = EligiblePairs(starts=starts, records=numbers, distances=np.zeros(len(numbers)))
            return cls(candidates=pairs.without_distances(), apart=apart, most=most)
        length = ranked_length(spec, records)
        indices = message.tensor("indices", dtype=np.int64, shape=(rows, length))
        require_numbers(message, indices, below=records, lowest=-1)
        ranked = LinkTable(indices=indices, distances=np.zeros(indices.shape))
        return cls(candidates=ranked.without_distances(), apart=apart, most=most)


def require_numbers(
    message: Message, numbers: Int64[np.ndarray, "..."], *, below: int, lowest: int = 0
) -> None:
    """Check the numbers of rows or records of a message.

    Raises:
        ProtocolError: If there is no such row or record.
    """
    if numbers.size and not lowest <= numbers.min() <= numbers.max() < below:
        raise ProtocolError(f"{message.sender}: named a row or record that does not exist")
