"""Which of the primary's rows are aligned: linked to a record, at every secondary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alignment:
    """What the primary knows of which rows are linked: neither records nor distances."""

    names: Sequence[str]
    """The secondaries, by rank."""

    linked: Bool[np.ndarray, "rows secondaries"]
    """Whether a row has a link at a secondary."""

    apart: Sequence[str]
    """Secondaries at which some row's nearest record has another key, and no largest distance says
    whether the two are one."""

    @property
    def everywhere(self) -> Bool[np.ndarray, " rows"]:
        """Which rows are linked at every secondary: the aligned ones."""
        return np.asarray(self.linked.all(axis=1))

    def warning(self, *, unit: str) -> str | None:
        """Return what a user should hear of it, in one line; None if there is nothing.

        Args:
            unit: What distances are in.
        """
        if not self.apart:
            return None
        return (
            f"linkage.max_distance is not set, and at {', '.join(self.apart)} nearest keys are not "
            f"all equal, so every row that has a link counts as aligned; set it to the farthest "
            f"that a true match may be (unit: {unit})"
        )

    def figures(self, *, max_distance: float | None, unit: str) -> dict[str, Any]:
        """Return what run folders hold of it: counts, never a row.

        Args:
            max_distance: The farthest that a link may be; None for no limit.
            unit: What distances are in.
        """
        return {
            "rows": len(self.linked),
            "aligned": int(self.everywhere.sum()),
            "by_secondary": dict(zip(self.names, self.linked.sum(axis=0).tolist(), strict=True)),
            "max_distance": max_distance,
            "distance_unit": unit,
            "warning": self.warning(unit=unit),
        }
