"""What a run's model answers with fewer partners, and what that is worth on its test rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.core.errors import ConfigError, DataError, PrivacyError
from securevfl.core.progress import Observer, Stage, unheard
from securevfl.federation.absence import in_blocks
from securevfl.federation.kept_model import KeptModel
from securevfl.federation.run_plan import RunFacts, plan_prediction
from securevfl.models.contribution import measure
from securevfl.runtime.coalitions_of_models import KeptModels
from securevfl.runtime.coalitions_of_releases import Releases
from securevfl.runtime.device import device_named
from securevfl.runtime.kept_contribution import read_contribution
from securevfl.runtime.kept_run import KeptRun
from securevfl.runtime.released_table import METADATA, released_table
from securevfl.runtime.run_folder import read_figures
from securevfl.runtime.tables import read_party

NEVER_FEWER: Final = (
    "the model was trained without party dropout and has never met an average over fewer "
    "secondaries; with model.party_dropout it would have"
)
"""What there is to say of an average over fewer secondaries than in training."""


def worth_without(
    run: KeptRun, absent: Sequence[str], *, observe: Observer = unheard
) -> dict[str, Any] | None:
    """Return what the kept model is worth on the run's test rows without some partners.

    Args:
        run: The run.
        absent: Names of those that are gone.
        observe: Hears that it is measured.

    Returns:
        ``used``, who answers then (the primary alone where that is better on validation rows);
        ``threshold`` of the primary alone; ``metrics``, each with ``value`` and ``interval``. From
        ``contribution.json``, or measured now where that is free; None where it is neither.

    Reveals:
        Nothing: nobody is asked, and no ledger is charged.
    """
    config = run.config
    model = run.model(config.primary.name)
    present = {party.name for party in config.secondaries} - set(absent)
    kept = read_contribution(run.folder, run=model.run)
    if kept is not None:
        for one in kept["gone"]["values"]:
            if set(one["partners"]) == present:
                found = {name: one[name] for name in ("used", "metrics")}
                return {**found, "threshold": kept["threshold"]}
    try:
        source = source_of(run, model, read_figures(run.folder))
    except (ConfigError, DataError, PrivacyError):
        # It would take releases, or what it takes is not here.
        return None
    observe(Stage(text="measuring the model without them"))
    valued = source.gone()(frozenset(present))
    figures = measure(valued, source.data.head, source.alone.tested, seed=config.federation.seed)
    return {
        "used": valued.used,
        "metrics": {name: figure.as_json() for name, figure in figures.items()},
        "threshold": source.alone.threshold,
    }


def source_of(run: KeptRun, model: KeptModel, figures: Mapping[str, Any]) -> Releases | KeptModels:
    """Return where outputs with fewer partners come from.

    Raises:
        ConfigError: Like DataError and PrivacyError, if they cannot be had for nothing.
    """
    if _in_blocks(run.config):
        return _releases(run, model)
    return _kept_models(run, figures)


def _in_blocks(config: FederationConfig) -> bool:
    if config.privacy.encoder != "frozen":
        return False
    return len(config.secondaries) == 1 or in_blocks(config)


def _releases(run: KeptRun, model: KeptModel) -> Releases:
    config = run.config
    if config.training.rows == "aligned":
        raise ConfigError(
            'training.rows = "aligned": which rows were trained on is not kept, so nothing can be '
            'trained again; run with training.rows = "all"'
        )
    if config.family.needs_similarities(config.model):
        raise ConfigError(
            f"model.family: {config.family.name!r} reads similarities, which are not kept; the "
            f"value of partners can be measured of families that read releases alone"
        )
    table = (run.tables or {}).get(config.primary.name)
    if table is None:
        table = read_party(config, config.primary, run.data_root)
    frame = released_table(config, run.folder, table)
    shape = frame.attrs[METADATA]["shape"]
    numbers = frame.iloc[:, -int(np.prod(shape)) :].to_numpy(dtype=np.float32, copy=True)
    return Releases(
        config,
        table,
        model,
        torch.from_numpy(numbers.reshape(len(frame), *shape)),
        device=device_named(run.device),
    )


def _kept_models(run: KeptRun, figures: Mapping[str, Any]) -> KeptModels:
    config = run.config
    if config.privacy.mechanism != "none":
        raise PrivacyError(_what_it_would_take(run, figures))
    if figures["mode"] != "simulated":
        raise ConfigError(
            "run: its parties have processes and tables of their own; simulate the same file, or "
            'take privacy.encoder = "frozen" with encoder.layout = "blocks", of which everything '
            "lies at the primary"
        )
    similarities = link_spec(config).similarities
    if similarities is not None and (similarities.noise or similarities.tau is not None):
        raise ConfigError(
            "linkage.similarity_noise, similarity_tau: the noise of similarities is drawn once and "
            "not kept, so the run's model cannot be measured again; simulate it with "
            "similarity_noise = 0"
        )
    tables = run.tables or {
        party.name: read_party(config, party, run.data_root) for party in config.table_parties
    }
    models = {party.name: run.model(party.name) for party in config.table_parties}
    return KeptModels(config, tables, models, device=device_named(run.device))


def _what_it_would_take(run: KeptRun, figures: Mapping[str, Any]) -> str:
    config, rows = run.config, figures["evaluation"]["rows"]
    passes = len(config.secondaries)
    model = run.model(config.primary.name)
    facts = RunFacts(
        rows=rows,
        train_rows=0,
        validation_rows=0,
        test_rows=0,
        predicts=True,
        predicted_rows=rows,
    )
    plan = plan_prediction(config, facts, noise_share_std=model.noise_share_std)
    once = plan.releases
    several = replace(
        once,
        min_active=max(1, passes - 1),
        rounds=passes * once.rounds,
        row_releases=passes * once.row_releases,
        releases_per_row=passes,
    )
    epsilon = several.epsilon(plan.noise_share_std)
    own_numbers = '[encoder] layout = "blocks"'
    if config.encoder is not None and config.encoder.method == "votes":
        own_numbers = f'{own_numbers} (method = "principal"; votes share their numbers)'
    return (
        f"contribution: this run's releases are sums over the secondaries, and leaving out each "
        f"of {passes} would take {passes} more releases of the {rows} test rows, epsilon "
        f'{epsilon:.3g} beside the run\'s; a run with privacy.encoder = "frozen" and '
        f"{own_numbers} has the answer in what it releases, for nothing"
    )
