"""One method with one seed: train it, and write the file that marks it as done."""

import dataclasses
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.methods import ALONE, IN_ONE_PLACE, baseline_settings, method_family
from securevfl.config.reading import method_config
from securevfl.core import files
from securevfl.core.errors import ConfigError, PrivacyError, SecureVflError
from securevfl.core.progress import Observer
from securevfl.data.tables import PartyTable
from securevfl.federation.run_plan import run_facts
from securevfl.runtime.simulation import simulate_federation
from securevfl.runtime.tables import read_party, read_tables
from securevfl.studies.compare.pooled_methods import train_in_one_place
from securevfl.version import __version__

_KEPT: Final = (
    "metric",
    "higher_is_better",
    "train",
    "validation",
    "test",
    "validation_metrics",
    "test_metrics",
    "epochs",
    "best_epoch",
)
"""What of a simulated run's figures stands in its result, as every method's does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodRun:
    """One run of a comparison."""

    method: str
    """What is trained."""

    seed: int
    """Run seed: of the split into training, validation and test rows, of initialisation, of
    shuffling and of dropout."""

    def folder(self, comparison: Path) -> Path:
        """Return this run's own folder."""
        return comparison / "runs" / self.method / f"seed-{self.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A method that has no figures."""

    method: str
    """Its name."""

    status: str
    """``"skipped"``: it does not fit the file or the tables, so nothing was trained; ``"failed"``:
    a run of it ended in an error."""

    reason: str
    """What people read."""


def reason_of(error: Exception, run: MethodRun, *, comparison: Path) -> str:
    """Return why a run failed, in a line.

    What is no error of ours is a defect here or in another package: its trace is kept in the run's
    folder, as ``failure.txt``.
    """
    if isinstance(error, SecureVflError):
        return f"seed {run.seed}: {error}"
    path = run.folder(comparison) / "failure.txt"
    files.write_text(path, "".join(traceback.format_exception(error)))
    text = " ".join(str(error).split())
    return f"seed {run.seed}: {type(error).__name__}: {text} (trace: {path})"


def tables_for(
    config: FederationConfig, methods: Sequence[str], data_root: Path
) -> dict[str, PartyTable]:
    """Read the tables that methods need: the primary's alone where none reads another.

    Raises:
        DataError: As :func:`securevfl.runtime.tables.read_party`.
    """
    if all(method_family(config.source, name) in ALONE for name in methods):
        return {config.primary.name: read_party(config, config.primary, data_root)}
    return read_tables(config, data_root)


def run_config(config: FederationConfig, run: MethodRun) -> FederationConfig:
    """Return the federation that a run trains.

    Raises:
        ConfigError: If there is no such method.
    """
    own = method_config(config, run.method)
    source = dict(own.source)
    source["federation"] = {**source["federation"], "seed": run.seed}
    federation = dataclasses.replace(own.federation, seed=run.seed)
    return dataclasses.replace(own, federation=federation, source=source)


def run_digest(config: FederationConfig, run: MethodRun, *, tables_digest: str) -> str:
    """Return a digest of all that a run's result depends on."""
    settings = run_config(config, run).settings_digest
    if method_family(config.source, run.method) in IN_ONE_PLACE:
        settings += f" {baseline_settings(config.source, run.method)}"
    return f"{settings} {tables_digest}"


def finished_run(comparison: Path, run: MethodRun, *, digest: str) -> dict[str, Any] | None:
    """Return what a finished run found, or None if it is still to be done.

    Raises:
        ConfigError: If it was trained under other settings or on other tables, or lacks figures.
    """
    path = run.folder(comparison) / "result.json"
    if not path.exists():
        return None
    try:
        result = files.read_json(path)
        made_from = result["made_from"]
    except (ConfigError, KeyError):
        raise ConfigError(f"{path}: is not a run's result; remove it") from None
    if made_from != digest:
        raise ConfigError(
            f"{path}: was trained under other settings or on other tables; "
            f"remove {path.parent}, or choose another --out"
        )
    if not {*_KEPT} <= {*result}:
        raise ConfigError(
            f"{path}: was written by another version, which kept other figures; "
            f"remove {path.parent}, or choose another --out"
        )
    return result


def train_run(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    run: MethodRun,
    *,
    comparison: Path,
    digest: str,
    device: torch.device,
    observe: Observer,
) -> dict[str, Any]:
    """Train, and write ``result.json`` as the last thing.

    Args:
        config: The federation file with its ``[methods]``.
        tables: Every party's table.
        run: What to train.
        comparison: The comparison's folder.
        digest: What :func:`run_digest` says of this run.
        device: Where models are computed.
        observe: Hears of progress.

    Raises:
        SecureVflError: As the run itself.

    Reveals:
        Everything is in one process: a comparison protects nobody's table.
    """
    own = run_config(config, run)
    folder = run.folder(comparison)
    family = method_family(config.source, run.method)
    wall, cpu = time.monotonic(), time.process_time()
    if family in IN_ONE_PLACE:
        settings = baseline_settings(config.source, run.method)
        figures, head = train_in_one_place(own, tables, family, settings, device)
        result, whole = (
            {
                "metric": head.metric_name,
                "higher_is_better": head.higher_is_better,
                **dataclasses.asdict(figures),
                "epsilon": None,
            },
            True,
        )
    else:
        result, whole = _simulate(own, tables, folder, device=device, observe=observe)
    split, _ = run_facts(own, tables[own.primary.name])
    result |= {
        "method": run.method,
        "family": family,
        "seed": run.seed,
        "train_rows": len(split.train),
        "seconds": round(time.monotonic() - wall, 3) if whole else None,
        "cpu_seconds": round(time.process_time() - cpu, 3) if whole else None,
        "made_from": digest,
        "version": __version__,
    }
    files.write_json(folder / "result.json", result)
    # Checkpoints and ledgers were for going on; what is left is small enough to keep many.
    shutil.rmtree(folder / "parties", ignore_errors=True)
    return result


def _simulate(
    own: FederationConfig,
    tables: Mapping[str, PartyTable],
    folder: Path,
    *,
    device: torch.device,
    observe: Observer,
) -> tuple[dict[str, Any], bool]:
    """Return a simulated run's figures, and whether it was done in one go."""
    metrics, whole = None, True
    if (folder / "parties").is_dir():
        # What a run with noise has released before would count against its budget a second time,
        # and it would end earlier than one in one go.
        if own.privacy.mechanism == "none":
            metrics = _go_on(own, tables, folder, device=device, observe=observe)
            whole = metrics is None
        if metrics is None:
            shutil.rmtree(folder)
    if metrics is None:
        metrics = simulate_federation(
            own, tables, folder, device=device, with_alone=False, observe=observe
        ).metrics
    figures = {name: metrics[name] for name in _KEPT}
    return {**figures, "epsilon": metrics["privacy"]["epsilon"]}, whole


def _go_on(
    own: FederationConfig,
    tables: Mapping[str, PartyTable],
    folder: Path,
    *,
    device: torch.device,
    observe: Observer,
) -> dict[str, Any] | None:
    try:
        return simulate_federation(
            own, tables, folder, device=device, resume=True, with_alone=False, observe=observe
        ).metrics
    except (ConfigError, PrivacyError):
        # Cut off before its first epoch was saved by all, or under other settings.
        return None
