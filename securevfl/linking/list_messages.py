"""Received lists and similarities, checked before they are used."""

import numpy as np
from jaxtyping import Float32, Int64

from securevfl.core.errors import ProtocolError
from securevfl.linkage.capped import EligiblePairs
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.candidates import Candidates, places_of, ranked_length
from securevfl.linking.kept_links import may_be_kept
from securevfl.transport.message import Message


def read_similarities(
    spec: LinkSpec, message: Message, *, rows: int
) -> Float32[np.ndarray, "rows links"] | None:
    """Return the similarities that a message brings, if the family reads any.

    Raises:
        ProtocolError: If they are not what was agreed on.
    """
    if spec.similarities is None:
        return None
    values = message.tensor(
        "similarities",
        dtype=np.float32,
        shape=(rows, spec.choice.neighbours),
        finite=False,
    )
    if np.isinf(values).any():
        raise ProtocolError(f"{message.sender}: sent a similarity that is infinite")
    return values


def read_candidates(spec: LinkSpec, message: Message, *, rows: int, records: int) -> Candidates:
    """Return a coordinator's lists, whose order is all that they tell.

    Raises:
        ProtocolError: If they are not what was agreed on.
    """
    if spec.choice.links_per_record is not None and not may_be_kept(spec):
        starts = message.tensor("starts", dtype=np.int64, shape=(rows + 1,))
        numbers = message.tensor("records", dtype=np.int64, shape=(None,))
        if starts[0] != 0 or starts[-1] != len(numbers) or (np.diff(starts) < 0).any():
            raise ProtocolError(f"{message.sender}: sent pairs that do not add up")
        require_numbers(message, numbers, below=records)
        pairs = EligiblePairs(starts=starts, records=numbers, distances=np.zeros(len(numbers)))
        return Candidates(pairs=pairs).without_distances()
    length = ranked_length(spec, records)
    indices = message.tensor("indices", dtype=np.int64, shape=(rows, length))
    require_numbers(message, indices, below=records, lowest=-1)
    return Candidates(ranked=places_of(indices))


def require_numbers(
    message: Message, numbers: Int64[np.ndarray, "..."], *, below: int, lowest: int = 0
) -> None:
    """Check the numbers of rows or records that came in a message.

    Raises:
        ProtocolError: If there is no such row or record.
    """
    if numbers.size and not lowest <= numbers.min() <= numbers.max() < below:
        raise ProtocolError(f"{message.sender}: named a row or record that there is not")
