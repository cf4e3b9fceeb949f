"""Key columns as arrays that a message can hold, and back."""

from typing import Final

import numpy as np

from securevfl.core.errors import ProtocolError
from securevfl.data.tables import KeyTable
from securevfl.linkage.spec import LinkSpec
from securevfl.transport.message import Message

_MISSING: Final = -1


def pack_columns(spec: LinkSpec, keys: KeyTable) -> dict[str, np.ndarray]:
    """Return a party's key columns as arrays: numbers as they are, texts as UTF-8 and lengths."""
    arrays: dict[str, np.ndarray] = {}
    for number, (name, kind) in enumerate(spec.keys.kinds.items()):
        column = keys.columns[name]
        if kind == "number":
            arrays[f"number:{number}"] = column
            continue
        words = [None if text is None else text.encode() for text in column.tolist()]
        lengths = [_MISSING if word is None else len(word) for word in words]
        joined = b"".join(word for word in words if word is not None)
        arrays[f"text:{number}"] = np.frombuffer(joined, dtype=np.uint8)
        arrays[f"lengths:{number}"] = np.array(lengths, dtype=np.int64)
    return arrays


def unpack_columns(spec: LinkSpec, message: Message, *, rows: int) -> KeyTable:
    """Return the columns of a received message.

    Raises:
        ProtocolError: If they are not what the federation file says.
    """
    columns: dict[str, np.ndarray] = {}
    for number, (name, kind) in enumerate(spec.keys.kinds.items()):
        if kind == "number":
            gaps = spec.keys.fields is not None
            columns[name] = message.tensor(
                f"number:{number}", dtype=np.float64, shape=(rows,), finite=not gaps
            )
            continue
        lengths = message.tensor(f"lengths:{number}", dtype=np.int64, shape=(rows,))
        joined = message.tensor(f"text:{number}", dtype=np.uint8, shape=(None,)).tobytes()
        columns[name] = _texts(joined, lengths, sender=message.sender)
    return KeyTable(name=message.sender, columns=columns)


def _texts(joined: bytes, lengths: np.ndarray, *, sender: str) -> np.ndarray:
    sizes = np.maximum(lengths, 0)
    ends = np.cumsum(sizes)
    if lengths.min(initial=0) < _MISSING or (ends[-1] if len(ends) else 0) != len(joined):
        raise ProtocolError(f"{sender}: sent key texts whose lengths do not add up")
    column = np.empty(len(lengths), dtype=object)
    try:
        column[:] = [
            None if length == _MISSING else joined[end - length : end].decode()
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]
    except UnicodeDecodeError:
        raise ProtocolError(f"{sender}: sent key texts that are not UTF-8") from None
    return column
