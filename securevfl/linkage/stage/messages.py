"""What parties tell one another to link, whatever hides their keys.

Messages that one protection alone needs are beside it, in :mod:`securevfl.linking.protections`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float32, Int64

from securevfl.core.errors import ProtocolError
from securevfl.linkage.links import Alignment
from securevfl.linkage.sampling import EligiblePairs
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.candidates import Candidates, places_of, ranked_length
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, TypedMessage


class LinkingKind(MessageKind):
    """What parties tell one another to link their keys."""

    LINK_KEYS = 7
    """Primary to every secondary: its key columns with their mean and deviation, as the linkage
    protection ``none`` allows."""

    LINKED = 8
    """Secondary to primary: linkage is done; for families that read them, noised similarities of
    every row's links, in falling order and without record numbers."""

    LINK_CODES = 21
    """Data party to coordinator: Bloom-filter codes of its keys under the linkage secret, and a
    value that tells whether two secrets are equal."""

    LINK_TURN = 22
    """Whose turn in a protected linkage: numbers of rows and records. Tells nothing else."""

    LINK_DEALING = 23
    """Dealer to a data party: uniformly random masks for one block."""

    LINK_MASKED = 24
    """Data party to data party: its keys under a mask that the other does not know."""

    LINK_SHARE = 25
    """Data party to coordinator: its share of one block's squared distances."""

    LINK_CIPHERS = 26
    """Primary to a secondary: its keys, encrypted; back: masked distances, encrypted."""

    LINK_LISTS = 27
    """Coordinator to a secondary: for each primary row, record numbers in order of distance."""

    SIMILARITIES = 28
    """Coordinator to primary: one secondary's noised similarities in falling order, without
    record numbers."""

    LINK_CELLS = 29
    """Primary to a secondary: a random shift of the grid. Data party to coordinator: the grid cell
    of each of its keys, shifted. Only where ``linkage.cell`` says so."""

    LINK_BLOCK = 30
    """Coordinator to primary: numbers of its rows to compare next, with how many records. To a
    secondary: numbers of its records to compare next, with how many rows. Without
    ``linkage.cell`` it tells nothing but sizes."""

    LINKED_ROWS = 31
    """Secondary to primary: which rows have a link, where only aligned rows are learned from."""


Similarities = Float32[np.ndarray, "rows links"]
"""One secondary's noised similarities, NaN where a slot holds no record."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Linked(TypedMessage):
    """That linkage is done; for families that read any, noised similarities in falling order."""

    KIND = LinkingKind.LINKED
    WAY = "secondary to primary"

    similarities: Similarities | None = None
    """None if the family reads none, or the primary gets them from a coordinator."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        values = self.similarities
        return Message(kind=self.KIND, tensors={} if values is None else {"similarities": values})

    @classmethod
    def from_message(cls, message: Message, *, spec: LinkSpec, rows: int) -> "Linked":
        """Check a received one, whose sender linked by itself.

        Raises:
            ProtocolError: If similarities are due and are not what was agreed on.
        """
        if spec.similarities is None:
            return cls()
        return cls(similarities=_similarities(message, spec=spec, rows=rows))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LinkedRows(DeclaredMessage):
    """For each of the primary's rows, whether it has a link at the sender.

    Only where aligned rows alone are learned from: in cross-party pretraining, and with
    ``training.rows = "aligned"``. Without ``linkage.max_distance`` it also says whether some row's
    nearest record has another key than the row.
    """

    KIND = LinkingKind.LINKED_ROWS
    WAY = "secondary to primary"

    rows: Bool[np.ndarray, " rows"]
    """One a row."""

    apart: bool
    """See :attr:`securevfl.linkage.spec.LinkedSecondary.apart`."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MadeSimilarities(TypedMessage):
    """One secondary's noised similarities in falling order, without record numbers."""

    KIND = LinkingKind.SIMILARITIES
    WAY = "coordinator to primary"

    values: Similarities
    """K of each row."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"similarities": self.values})

    @classmethod
    def from_message(cls, message: Message, *, spec: LinkSpec, rows: int) -> "MadeSimilarities":
        """Check a received one.

        Raises:
            ProtocolError: If it is not what was agreed on.
        """
        return cls(values=_similarities(message, spec=spec, rows=rows))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Lists(TypedMessage):
    """For each primary row, record numbers in order of distance.

    Where secondaries tell which rows are linked, and ``linkage.max_distance`` is not set, also
    whether some row's nearest record has another key than the row.
    """

    KIND = LinkingKind.LINK_LISTS
    WAY = "coordinator to a secondary"

    candidates: Candidates
    """Their distances do not travel; received ones have places of the list instead."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        pairs, ranked = self.candidates.pairs, self.candidates.ranked
        if pairs is not None:
            tensors = {"starts": pairs.starts, "records": pairs.records}
        else:
            assert ranked is not None, "one of the two forms is there"
            tensors = {"indices": ranked.indices}
        return Message(kind=self.KIND, meta={"apart": self.candidates.apart}, tensors=tensors)

    @classmethod
    def from_message(cls, message: Message, *, spec: LinkSpec, rows: int, records: int) -> "Lists":
        """Check received lists.

        Raises:
            ProtocolError: If they are not what was agreed on.
        """
        apart = message.figure("apart", bool)
        if spec.choice.links_per_record is not None and not spec.choice.fixed:
            starts = message.tensor("starts", dtype=np.int64, shape=(rows + 1,))
            numbers = message.tensor("records", dtype=np.int64, shape=(None,))
            if starts[0] != 0 or starts[-1] != len(numbers) or (np.diff(starts) < 0).any():
                raise ProtocolError(f"{message.sender}: sent pairs that do not add up")
            require_numbers(message, numbers, below=records)
            pairs = EligiblePairs(starts=starts, records=numbers, distances=np.zeros(len(numbers)))
            found = Candidates(pairs=pairs).without_distances()
            return cls(candidates=replace(found, apart=apart))
        length = ranked_length(spec, records)
        indices = message.tensor("indices", dtype=np.int64, shape=(rows, length))
        require_numbers(message, indices, below=records, lowest=-1)
        return cls(candidates=Candidates(ranked=places_of(indices), apart=apart))


def alignment_of(spec: LinkSpec, told: Sequence[LinkedRows | None]) -> Alignment | None:
    """Put together what all secondaries told of the rows that they linked; None if nobody did.

    Args:
        spec: What linking needs.
        told: One a secondary, by rank.
    """
    given = [one for one in told if one is not None]
    if not given:
        return None
    names = spec.roles.present
    return Alignment(
        names=names,
        linked=np.stack([one.rows for one in given], axis=1),
        apart=[name for name, one in zip(names, given, strict=True) if one.apart],
    )


def require_numbers(
    message: Message, numbers: Int64[np.ndarray, "..."], *, below: int, lowest: int = 0
) -> None:
    """Check the numbers of rows or records that came in a message.

    Raises:
        ProtocolError: If there is no such row or record.
    """
    if numbers.size and not lowest <= numbers.min() <= numbers.max() < below:
        raise ProtocolError(f"{message.sender}: named a row or record that there is not")


def _similarities(message: Message, *, spec: LinkSpec, rows: int) -> Similarities:
    shape = (rows, spec.choice.neighbours)
    values = message.tensor("similarities", dtype=np.float32, shape=shape, finite=False)
    if np.isinf(values).any():
        raise ProtocolError(f"{message.sender}: sent a similarity that is infinite")
    return values
