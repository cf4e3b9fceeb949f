"""Simulate a federation from Python: on tables in memory, or as a federation file says."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, overload

from securevfl.callbacks import Callback, Hearing
from securevfl.config.auto import AUTO
from securevfl.config.base import BaseSettings, base_source
from securevfl.config.encoder import EncoderSettings
from securevfl.config.linkage import LinkageSettings
from securevfl.config.reading import parse_federation
from securevfl.config.sections import PredictionSettings, TrainingSettings
from securevfl.config.top import top_source
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, unheard
from securevfl.core.task import Task
from securevfl.data.tables import PartyTable
from securevfl.dp.privacy import Privacy
from securevfl.models.family import FamilySettings
from securevfl.models.fedhssl.settings import PretrainingSettings
from securevfl.models.registry import family_of
from securevfl.runtime.device import device_named
from securevfl.runtime.entry import FederationSource, simulate_from_file
from securevfl.runtime.kept_run import TemporaryFolder
from securevfl.runtime.simulation import RunResult, simulate_federation


@overload
def simulate(
    parties: Sequence[PartyTable],
    model: FamilySettings | None = None,
    *,
    privacy: Privacy,
    encoder: EncoderSettings | Literal["auto"] | None = None,
    training: TrainingSettings | None = None,
    pretraining: PretrainingSettings | None = None,
    linkage: LinkageSettings | None = None,
    prediction: PredictionSettings | None = None,
    base: Any = None,
    top: Any = None,
    task: Task | None = None,
    bounds: Mapping[str, Sequence[float]] | Sequence[float] | None = None,
    seed: int = 0,
    with_alone: bool = True,
    device: str = "cpu",
    out: Path | None = None,
    observe: Observer = ...,
    callbacks: Sequence[Callback] = ...,
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
    callbacks: Sequence[Callback] = ...,
) -> RunResult: ...


def simulate(
    parties: Sequence[PartyTable] | FederationSource,
    model: FamilySettings | None = None,
    *,
    privacy: Privacy | None = None,
    encoder: EncoderSettings | Literal["auto"] | None = None,
    training: TrainingSettings | None = None,
    pretraining: PretrainingSettings | None = None,
    linkage: LinkageSettings | None = None,
    prediction: PredictionSettings | None = None,
    base: Any = None,
    top: Any = None,
    task: Task | None = None,
    bounds: Mapping[str, Sequence[float]] | Sequence[float] | None = None,
    seed: int | None = None,
    with_alone: bool = True,
    data_root: Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    out: Path | None = None,
    observe: Observer = unheard,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run a federation in this process: on tables in memory, or as its file says.

    Args:
        parties: The primary's table, with labels, then the secondaries', from
            :func:`securevfl.data.from_frame`, a file or a split; or the path of a
            federation file, or what :func:`securevfl.read_federation` returned.
        model: A family's settings, for example ``securevfl.models.FeT(neighbours=50)``; of an
            installed package's family, too. This and what follows up to ``seed`` goes with
            tables; a federation file says it itself.
        privacy: What is promised; ``Privacy(mechanism="none")`` promises nothing.
        encoder: How frozen encoders are made; default: as the family does. ``"auto"`` takes, beside
            tables, a promise and what else is given, the settings of :mod:`securevfl.config.auto`;
            then ``model`` may be left out.
        training: Epochs, batch size and so on; default: :class:`TrainingSettings`.
        pretraining: For families that pretrain; default: :class:`PretrainingSettings`.
        linkage: Who chooses links, and by what; default: each row its K nearest records, with the
            primary's keys shown to every secondary.
        prediction: What predictions of the model may spend beside training.
        base: What the joint model is averaged with: ``"boosting"``, ``"linear"``,
            ``"best"`` of these and a perceptron (the default), any estimator of scikit-learn (a
            classifier needs ``predict_proba``), or ``"none"``, as in the papers.
        top: With frozen encoders, an estimator in place of the family's top network, fitted to own
            columns, keys and released numbers: ``"boosting"``, ``"linear"`` or any of scikit-learn.
        task: What the label is; default: multiclass or binary if the labels are classes,
            regression otherwise.
        bounds: ``[low, high]`` of all features, or such a pair by party name: declared ranges that
            do not depend on the data, as a frozen encoder's guarantee needs. Without them each
            party standardises its features by its own statistics.
        seed: Run seed of splits, initialisation, shuffling and dropout; never of noise. Default 0.
        with_alone: With tables, whether the best model of the primary alone is found too, to
            compare with.
        data_root: With a federation file, where relative data paths start; default: next to the
            file, and the current folder if there is no file.
        resume: With a federation file, go on from the last epoch that was saved in ``out``.
        device: ``"cpu"`` or ``"cuda"``.
        out: Run folder; default: a temporary one, which is removed when the result is no longer
            referred to.
        observe: Hears of progress; what it raises ends the run.
        callbacks: Hear of progress and of the end, for example
            ``securevfl.callbacks.TensorBoard("logs")``; one that fails is left out with a warning.

    Returns:
        Metrics, history, losses and ledger; and the model, for :meth:`RunResult.predict`.

    Raises:
        ConfigError: If a setting is impossible, or does not go with what is simulated.
        PrivacyError: If the promise does not hold for what would run.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    of_tables: dict[str, Any] = {
        "model": model,
        "privacy": privacy,
        "encoder": encoder,
        "training": training,
        "pretraining": pretraining,
        "linkage": linkage,
        "prediction": prediction,
        "base": base,
        "top": top,
        "task": task,
        "bounds": bounds,
        "seed": seed,
    }
    hearing = Hearing(callbacks, observe)
    with contextlib.ExitStack() as failing, hearing.until_the_end():
        place: Path | TemporaryFolder = Path(out) if out is not None else TemporaryFolder()
        if isinstance(place, TemporaryFolder):
            failing.callback(place.remove)
        folder = place.path if isinstance(place, TemporaryFolder) else place
        if isinstance(parties, FederationSource):
            given = [name for name, value in of_tables.items() if value is not None]
            given += [] if with_alone else ["with_alone"]
            if given:
                raise ConfigError(f"{given[0]}: the federation file says it; leave it out")
            if resume and out is None:
                raise ConfigError("resume: needs out, the folder of the run that should go on")
            result = simulate_from_file(
                parties,
                out=folder,
                data_root=data_root,
                resume=resume,
                device=device,
                observe=hearing.tell,
            )
        else:
            if resume or data_root is not None:
                raise ConfigError("resume, data_root: go with a federation file, not with tables")
            names = _key_names(parties[0])
            result = simulate_federation(
                parse_federation(_source(parties, **of_tables), file="simulate()"),
                {table.name: _with_keys_called(names, table) for table in parties},
                folder,
                device=device_named(device),
                with_alone=with_alone,
                with_placebo=with_alone,
                observe=hearing.tell,
                base=None if isinstance(base, str) else base,
                top=None if isinstance(top, str) else top,
            )
        hearing.ended(result.metrics)
        failing.pop_all()
        assert result.trained is not None, "pretraining alone has an entry of its own"
        # Its folder lives as long as somebody can predict with it.
        trained = dataclasses.replace(result.trained, place=place)
        return dataclasses.replace(result, trained=trained)


_LEFT_TO_AUTO: Final = (("privacy", "encoder", "trained"), ("linkage", "choose", "rows"))
"""Table, field and default of what ``auto`` decides unless somebody asks for another."""


def _key_names(table: PartyTable) -> tuple[str, ...]:
    return table.key_names if table.link_columns is None else tuple(table.link_columns.columns)


def _with_keys_called(names: tuple[str, ...], table: PartyTable) -> PartyTable:
    """Return a table whose keys for linkage alone are called as the primary's are."""
    keys = table.link_columns
    if keys is None or len(keys.columns) != len(names):
        return table
    columns = dict(zip(names, keys.columns.values(), strict=True))
    return dataclasses.replace(table, link_columns=dataclasses.replace(keys, columns=columns))


def _task_of(primary: PartyTable) -> Task:
    if primary.classes is None:
        return "regression"
    return "binary" if len(primary.classes) == 2 else "multiclass"


def _source(
    parties: Sequence[PartyTable],
    *,
    model: FamilySettings | None,
    privacy: Privacy | None,
    encoder: EncoderSettings | Literal["auto"] | None,
    training: TrainingSettings | None,
    pretraining: PretrainingSettings | None,
    linkage: LinkageSettings | None,
    prediction: PredictionSettings | None,
    base: Any,
    top: Any,
    task: Task | None,
    bounds: Mapping[str, Sequence[float]] | Sequence[float] | None,
    seed: int | None,
) -> dict[str, Any]:
    """Return the federation file that a simulation of tables stands for."""
    auto = encoder == AUTO
    if model is None and not auto:
        raise ConfigError("model: must be given, for example securevfl.models.FeT()")
    if privacy is None:
        raise ConfigError('privacy: must be given; Privacy(mechanism="none") promises nothing')
    tables = []
    for number, party in enumerate(parties):
        own = bounds.get(party.name) if isinstance(bounds, Mapping) else bounds
        tables.append(
            {
                "name": party.name,
                "role": "secondary" if number else "primary",
                "data": "in memory",
                "key": list(_key_names(party)),
                **({} if number else {"label": "label", "address": "127.0.0.1:0"}),
                **({"scaling": "bounds", "bounds": list(own)} if own is not None else {}),
            }
        )
    if isinstance(encoder, EncoderSettings) and encoder.labels == "shares":
        tables.append({"name": "dealer", "role": "dealer"})
    kind = task or _task_of(parties[0])
    several = {"classes": len(parties[0].classes or ())} if kind == "multiclass" and auto else {}
    family = {} if model is None else {"family": family_of(model).name, **_given(model)}
    source: dict[str, Any] = {
        "federation": {"name": "simulation", "task": kind, "seed": seed or 0, **several},
        "model": {**family, **({} if top is None else {"top": top_source(top)})},
        "training": _given(training or TrainingSettings()),
        "pretraining": _given(pretraining or PretrainingSettings()),
        "privacy": _given(privacy),
        "prediction": _given(prediction or PredictionSettings()),
        "base": base_source(BaseSettings().estimator if base is None else base),
        "linkage": _given(linkage or LinkageSettings(protection="none")),
        "party": tables,
    }
    if encoder is not None:
        source["encoder"] = {"method": AUTO} if auto else _given(encoder)
    if auto:
        # Defaults of Python's are not what somebody has asked for.
        for table, name, default in _LEFT_TO_AUTO:
            if source[table].get(name) == default:
                del source[table][name]
    return source


def _given(settings: Any) -> dict[str, Any]:
    # TOML has no null: a setting that is None is one that is not there.
    fields = dataclasses.asdict(settings)
    return {name: value for name, value in fields.items() if value is not None}
