"""A run's privacy figures, computed again from a ledger's lines."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from securevfl.core.errors import PrivacyError
from securevfl.core.settings import read_settings
from securevfl.dp.fitting import fitting_from
from securevfl.dp.privacy import Privacy
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.chained_file import ChainedFile
from securevfl.federation.ledger import Ledger


def recomputed(entries: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return ``epsilon`` (None: no bound), ``releases`` and ``row_releases`` of a ledger's lines.

    Epsilon is at the delta of the last session, as the figures of its run are.

    Raises:
        PrivacyError: If they are no ledger's lines.
    """
    opened = [entry for entry in entries if entry.get("kind") == "open"]
    if not opened:
        raise PrivacyError("no session was opened in it")
    last = dict(opened[-1])
    settings = dict(last["plan"])
    privacy = read_settings(Privacy, settings.pop("privacy"), where="privacy")
    plan = ReleasePlan(privacy=privacy, fitting=fitting_from(settings.pop("fitting")), **settings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        copy = ChainedFile(path, durable=False)
        for entry in entries:
            copy.append(entry)
        copy.close()
        ledger = Ledger(
            path,
            party=last["party"],
            plan=plan,
            noise_share_std=last["noise_share_std"],
            durable=False,
        )
        try:
            spent = ledger.spent
            return {
                "epsilon": spent if math.isfinite(spent) else None,
                "releases": ledger.all_rounds,
                "row_releases": ledger.all_row_releases,
            }
        finally:
            ledger.close()
