"""One method with one seed: train it, and write the file that marks it as done."""

import dataclasses
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.methods import IN_ONE_PLACE, baseline_settings, method_family
from securevfl.config.reading import method_config, parse_federation
from securevfl.core import files
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.progress import Observer
from securevfl.data.tables import PartyTable
from securevfl.federation.run_plan import run_facts
from securevfl.runtime.simulation import simulate_federation
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


def run_config(config: FederationConfig, run: MethodRun) -> FederationConfig:
    """Return the federation that a run trains.

    Raises:
        ConfigError: If there is no such method.
    """
    source = dict(method_config(config, run.method).source)
    source["federation"] = {**source["federation"], "seed": run.seed}
    return parse_federation(source, file=run.method)


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
            own, tables, folder, device=device, with_solo=False, observe=observe
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
            own, tables, folder, device=device, resume=True, with_solo=False, observe=observe
        ).metrics
    except (ConfigError, PrivacyError):
        # Cut off before its first epoch was saved by all, or under other settings.
        return None
