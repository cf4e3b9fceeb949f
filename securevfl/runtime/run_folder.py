"""The figures in a run folder: ``metrics.json``, ``history.csv`` and ``federation.toml``."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from securevfl.config.channels import channels
from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.federation.ledger import Ledger
from securevfl.federation.run_plan import RunPlan

_COUNTS = ("epoch", "bytes")
HISTORY_FIELDS = ("epoch", "loss", "train", "validation", "seconds", "epsilon", "bytes")


def write_history(run_folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write ``history.csv``: a row an epoch."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, HISTORY_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: row.get(name, "") for name in HISTORY_FIELDS} for row in history)
    files.write_text(run_folder / "history.csv", buffer.getvalue())


def read_history(run_folder: Path) -> list[dict[str, Any]]:
    """Read ``history.csv``: one mapping an epoch, without what was not known.

    Raises:
        ConfigError: If the folder has none.
    """
    path = run_folder / "history.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                {name: _number(name, text) for name, text in row.items() if text}
                for row in csv.DictReader(file)
            ]
    except OSError:
        raise ConfigError(f"run folder {run_folder}: has no {path.name}") from None


def _number(name: str, text: str) -> float | int:
    return int(text) if name in _COUNTS else float(text)


def finite_or_none(value: float) -> float | None:
    """Return a figure that JSON can hold: None stands for "no bound"."""
    return value if math.isfinite(value) else None


def write_federation(run_folder: Path, config: FederationConfig) -> None:
    """Write ``federation.toml``: the settings that this run was made with."""
    files.write_text(run_folder / "federation.toml", tomli_w.dumps(dict(config.source)))


def privacy_figures(plan: RunPlan, ledger: Ledger) -> dict[str, Any]:
    """Return the ``privacy`` part of ``metrics.json``.

    Args:
        plan: What was planned; the promise was made for all of it.
        ledger: What was spent: by this session, and by those before it on the same ledger.
    """
    config, releases, tau = plan.config, plan.releases, plan.noise_share_std
    privacy = config.privacy
    multiplier = tau * math.sqrt(releases.parties - privacy.colluding) / releases.sensitivity()
    updates = {}
    if privacy.encoder == "dp-trained":
        updates = {
            "gradient_noise_multiplier": privacy.update_noise_ratio
            * releases.release_multiplier(tau),
            "gradient_noise_std": releases.gradient_noise_std(tau),
            "gradient_clip_norm": privacy.update_clip_norm,
            "updates": ledger.updates,
        }
    return {
        "mechanism": privacy.mechanism,
        "epsilon": finite_or_none(ledger.spent),
        "epsilon_planned": finite_or_none(releases.epsilon(tau)),
        "epsilon_as_published": finite_or_none(releases.epsilon_as_published(tau)),
        "delta": privacy.delta,
        "unit": privacy.unit,
        "encoder": privacy.encoder,
        "links_per_record": privacy.links_per_record,
        "sampling_rate": privacy.sampling_rate,
        "colluding": privacy.colluding,
        "accounting": privacy.accounting,
        "noise_multiplier": multiplier,
        "noise_share_std": tau,
        "fitting_noise_multiplier": releases.fitting_multiplier(),
        "sensitivity": releases.sensitivity(),
        "clip_norm": privacy.clip_norm,
        "releases": ledger.all_rounds,
        "row_releases": ledger.all_row_releases,
        "secondaries": releases.parties,
        **updates,
        "statement": releases.statement(tau),
        "as_published_note": _AS_PUBLISHED_NOTE,
        "channels": channels(config),
    }


_AS_PUBLISHED_NOTE = (
    "The papers count one step of sampled DP-SGD a round, with the noise of the average over the "
    "clip norm as its multiplier. That misses that a row moves by up to twice the clip norm, that "
    "one record is linked to several rows and that trained encoders remember records; on the other "
    "side, that frozen encoders release each row once and that pooled records move a row by less. "
    "So its figure may lie on either side of the sound one."
)
