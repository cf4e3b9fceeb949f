"""Simulate a federation from Python: on tables in memory, or as a federation file says."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from securevfl.config.linkage import LinkageSettings
from securevfl.config.reading import parse_federation
from securevfl.config.sections import TrainingSettings
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer
from securevfl.core.task import Task
from securevfl.data.tables import PartyTable
from securevfl.dp.privacy import Privacy
from securevfl.models.family import FamilySettings
from securevfl.models.fedhssl.settings import PretrainingSettings
from securevfl.models.registry import family_of
from securevfl.runtime.device import device_named
from securevfl.runtime.entry import FederationSource, simulate_from_file
from securevfl.runtime.simulation import RunResult, simulate_federation


@overload
def simulate(
    parties: Sequence[PartyTable],
    model: FamilySettings,
    *,
    privacy: Privacy,
    training: TrainingSettings | None = None,
    pretraining: PretrainingSettings | None = None,
    linkage: LinkageSettings | None = None,
    task: Task | None = None,
    bounds: Mapping[str, Sequence[float]] | Sequence[float] | None = None,
    seed: int = 0,
    device: str = "cpu",
    out: Path | None = None,
    observe: Observer = ...,
) -> RunResult: ...


@overload
def simulate(
    parties: FederationSource,
    *,
    data_root: Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    out: Path | None = None,
    observe: Observer = ...,
) -> RunResult: ...


def simulate(
    parties: Sequence[PartyTable] | FederationSource,
    model: FamilySettings | None = None,
    *,
    privacy: Privacy | None = None,
    training: TrainingSettings | None = None,
    pretraining: PretrainingSettings | None = None,
    linkage: LinkageSettings | None = None,
    task: Task | None = None,
    bounds: Mapping[str, Sequence[float]] | Sequence[float] | None = None,
    seed: int | None = None,
    data_root: Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    out: Path | None = None,
    observe: Observer = lambda _event: None,
) -> RunResult:
    """Run a federation in this process: on tables in memory, or as its file says.

    Args:
        parties: The primary's table, with labels, then the secondaries'; or the path of a
            federation file, or what :func:`securevfl.read_federation` returned.
        model: A family's settings, for example ``securevfl.models.FeT(neighbours=50)``; of an
            installed package's family, too. This and what follows up to ``seed`` goes with
            tables; a federation file says it itself.
        privacy: What is promised; ``Privacy(mechanism="none")`` promises nothing.
        training: Epochs, batch size and so on; default: :class:`TrainingSettings`.
        pretraining: For families that pretrain; default: :class:`PretrainingSettings`.
        linkage: Who chooses links, and by what; default: each row its K nearest records, with the
            primary's keys shown to every secondary.
        task: What the label is; default: multiclass or binary if the labels are classes,
            regression otherwise.
        bounds: ``[low, high]`` of all features, or such a pair by party name: declared ranges that
            do not depend on the data, as a frozen encoder's guarantee needs. Without them each
            party standardises its features by its own statistics.
        seed: Run seed of splits, initialisation, shuffling and dropout; never of noise. Default 0.
        data_root: With a federation file, where relative data paths start; default: next to the
            file, and the current folder if there is no file.
        resume: With a federation file, go on from the last epoch that was saved in ``out``.
        device: ``"cpu"`` or ``"cuda"``.
        out: Run folder; default: a temporary one that is removed.
        observe: Hears of progress.

    Returns:
        Metrics, history, losses and ledger.

    Raises:
        ConfigError: If a setting is impossible, or does not go with what is simulated.
        PrivacyError: If the promise does not hold for what would run.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    of_tables: dict[str, Any] = {
        "model": model,
        "privacy": privacy,
        "training": training,
        "pretraining": pretraining,
        "linkage": linkage,
        "task": task,
        "bounds": bounds,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory(prefix="securevfl-") as temporary:
        folder = out or Path(temporary)
        if isinstance(parties, FederationSource):
            given = [name for name, value in of_tables.items() if value is not None]
            if given:
                raise ConfigError(f"{given[0]}: the federation file says it; leave it out")
            if resume and out is None:
                raise ConfigError("resume: needs out, the folder of the run that should go on")
            return simulate_from_file(
                parties,
                out=folder,
                data_root=data_root,
                resume=resume,
                device=device,
                observe=observe,
            )
        if model is None:
            raise ConfigError("model: must be given, for example securevfl.models.FeT()")
        if privacy is None:
            raise ConfigError('privacy: must be given; Privacy(mechanism="none") promises nothing')
        if resume or data_root is not None:
            raise ConfigError("resume, data_root: go with a federation file, not with tables")
        source = _source(
            parties,
            model,
            privacy=privacy,
            training=training or TrainingSettings(),
            pretraining=pretraining or PretrainingSettings(),
            linkage=linkage or LinkageSettings(protection="none"),
            task=task or _task_of(parties[0]),
            bounds=bounds,
            seed=seed or 0,
        )
        return simulate_federation(
            parse_federation(source, file="simulate()"),
            {table.name: table for table in parties},
            folder,
            device=device_named(device),
            observe=observe,
        )


def _task_of(primary: PartyTable) -> Task:
    if primary.classes is None:
        return "regression"
    return "binary" if len(primary.classes) == 2 else "multiclass"


def _source(
    parties: Sequence[PartyTable],
    model: FamilySettings,
    *,
    privacy: Privacy,
    training: TrainingSettings,
    pretraining: PretrainingSettings,
    linkage: LinkageSettings,
    task: Task,
    bounds: Mapping[str, Sequence[float]] | Sequence[float] | None,
    seed: int,
) -> dict[str, Any]:
    tables = []
    for number, party in enumerate(parties):
        own = bounds.get(party.name) if isinstance(bounds, Mapping) else bounds
        tables.append(
            {
                "name": party.name,
                "role": "secondary" if number else "primary",
                "data": "in memory",
                "key": list(party.key_names),
                **({} if number else {"label": "label", "address": "127.0.0.1:0"}),
                **({"scaling": "bounds", "bounds": list(own)} if own is not None else {}),
            }
        )
    return {
        "federation": {"name": "simulation", "task": task, "seed": seed},
        "model": {"family": family_of(model).name, **_given(model)},
        "training": _given(training),
        "pretraining": _given(pretraining),
        "privacy": _given(privacy),
        "linkage": _given(linkage),
        "party": tables,
    }


def _given(settings: Any) -> dict[str, Any]:
    # TOML has no null: a setting that is None is one that is not there.
    fields = dataclasses.asdict(settings)
    return {name: value for name, value in fields.items() if value is not None}
