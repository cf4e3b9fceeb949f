"""Who learns what while linking: the statements that logs, reports and the threat model share."""

from collections.abc import Mapping
from typing import Final

from securevfl.linkage.spec import LinkSpec

_SHOWN: Final = {
    "primary": "nothing of a secondary's records",
    "secondary": "the primary's keys, and their mean and deviation",
}
_CODES: Final = {
    "primary": "nothing of a secondary's records",
    "secondary": "for each primary row, which of its own records are nearest, in order and without "
    "distances: roughly where the row lies among its own records",
    "coordinator": "the codes of all keys: every Hamming distance between any two rows; which keys "
    "are equal and how often; the order and spacing of numbers up to an affine map; with a few "
    "known rows, much more. Without the linkage secret it cannot encode guesses",
}
_SHARES: Final = {
    "primary": "uniformly random numbers, and how many records each secondary has",
    "secondary": "uniformly random numbers; for each primary row, which of its own records are "
    "nearest, in order and without distances",
    "coordinator": "the distance of every primary row to every record (with linkage.cell: to those "
    "it is compared with), rounded to 16 bits: both tables' shape up to rotation and shift, and "
    "with a few known rows all keys",
    "dealer": "how many rows and records there are",
}
_PAILLIER: Final = {
    "primary": "numbers masked to within 2^-40, and how many records each secondary has",
    "secondary": "ciphertexts; for each primary row, which of its own records are nearest, in "
    "order and without distances",
    "coordinator": _SHARES["coordinator"],
}
_CELLS: Final = {
    "primary": "for the rows of each grid cell, how many of a secondary's records they are "
    "compared with, first in the nearest cells, then within reach: how dense records are there, "
    "and roughly how far the K-th is",
    "secondary": "which of its records are near to cells that hold rows, and how many rows",
    "coordinator": "the grid cell of every row and record under a shift that it does not know: a "
    "map of both tables, to within a cell's width",
    "dealer": "how many rows and records each block of neighbouring cells has",
}
_CELLS_CAPPED: Final = {
    **_CELLS,
    "primary": "for each grid cell that holds a secondary's records, how many these are and which "
    "of its own rows are near: roughly where the records lie",
    "secondary": "how many rows are near to the records of each of its cells",
}
_BY_PROTECTION: Final[Mapping[str, Mapping[str, str]]] = {
    "none": _SHOWN,
    "bloom": _CODES,
    "shares": _SHARES,
    "paillier": _PAILLIER,
}


def reveals_of(spec: LinkSpec, role: str) -> list[str]:
    """Return what a party of that role learns from linking, one sentence each."""
    learned = [_BY_PROTECTION[spec.hiding.protection][role]]
    if spec.hiding.cell is not None:
        # Under a cap the records seek rows, and blocks follow the cells of the records.
        capped = spec.choice.links_per_record is not None
        learned.append((_CELLS_CAPPED if capped else _CELLS)[role])
    if spec.similarities is not None and role == "primary":
        learned.append(
            "for each of its rows and each secondary, K noised similarities in falling order, "
            "without record numbers"
        )
    return learned
