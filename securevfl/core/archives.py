"""Zip archives looked at before any of their content is in memory.

Numpy's archives, torch's files and skops' models are zip archives. A few bytes of one can unpack to
gigabytes, and an array in it can say that it has more numbers than the archive has bytes. Readers
make room for what is declared; so what is declared is checked first.
"""

import io
import zipfile
from typing import BinaryIO, Final

import numpy as np

_LONGEST_HEADER: Final = 10_000
"""Bytes of an array's header, the limit of numpy's own reader."""


def require_unpackable(content: BinaryIO | bytes, *, most: int | None = None) -> None:
    """Refuse an archive that would take more memory than it may.

    Args:
        content: The archive; an open file is left at its beginning.
        most: Bytes of all its parts, unpacked; None: the archive must be packed nowhere, as numpy
            and torch write theirs, so that its parts are no larger than itself.

    Raises:
        ValueError: If its parts are larger, an array in it says that it is larger than its part, or
            it is no zip archive.
    """
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    size = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            if most is None and any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise ValueError("is packed, and nothing that is kept here is")
            unpacked = sum(part.file_size for part in parts)
            if unpacked > (size if most is None else most):
                raise ValueError(f"would unpack to {unpacked} bytes")
            for part in parts:
                if part.filename.endswith(".npy"):
                    _require_honest(archive, part)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"is no whole archive ({error})") from None
    finally:
        file.seek(0)


def _require_honest(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> None:
    """Refuse an array whose header declares more bytes than its part has."""
    with archive.open(part) as file:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise ValueError(f"{part.filename} is of another format")
        shape, _, dtype = read(file, max_header_size=_LONGEST_HEADER)
        numbers = 1
        for side in shape:
            numbers *= side
        if (
            dtype.hasobject
            or min(shape, default=0) < 0
            or numbers * dtype.itemsize > part.file_size
        ):
            raise ValueError(f"{part.filename} says that it is larger than it is")
