"""Rehearsal: some of the primary's columns act as secondaries', behind the planned noise.

A rehearsal needs no protection: all columns are the primary's own.
"""

import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core.conventions import stream
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.columns import Column, features_of_column
from securevfl.data.schema import TableSchema
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.federation.base import Base, own_inputs
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import RunResult, simulate_federation

Overrides = Mapping[str, Mapping[str, Any]]
"""Settings by table of the federation file; None takes one out."""

# Of a family's settings, those that decide what a release holds and what reads it.
_OF_MODEL: Final = ("release", "neighbours", "hidden", "numbers", "top")


def settings_for(config: FederationConfig, epsilon: float | None) -> Overrides:
    """Return the settings of a run at an epsilon that differ from the file's.

    Args:
        config: The federation file.
        epsilon: Promised epsilon; None: no promise and no noise.
    """
    privacy: dict[str, Any] = {
        "mechanism": "none" if epsilon is None else "gaussian",
        "epsilon": epsilon,
        "noise_multiplier": None,
        "gradient_noise_multiplier": None,
    }
    if epsilon is None and config.regime.noises_updates:
        # An encoder that learns without a promise is called so, and takes none of its settings.
        privacy |= {"encoder": "trained", "gradient_share": None, "gradient_clip_norm": None}
    return {"privacy": privacy}


def merge_settings(source: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return a parsed federation file with other settings; the source stays as it is."""
    result = dict(source)
    for section, fields in overrides.items():
        table = {**result.get(section, {}), **fields}
        result[section] = {name: value for name, value in table.items() if value is not None}
    return result


def chosen_settings(config: FederationConfig) -> dict[str, Any]:
    """Return the settings that decide which signal survives, by ``table.field``."""
    model = config.model
    chosen: dict[str, Any] = {"model.family": config.family.name}
    chosen |= {f"model.{name}": getattr(model, name) for name in _OF_MODEL if hasattr(model, name)}
    if config.top is not None:
        chosen["model.top"] = config.top.name
    if config.encoder is not None:
        chosen["encoder.method"] = config.encoder.method
        chosen["encoder.layout"] = "blocks" if config.encoder.in_blocks else "sum"
        if config.encoder.labels is not None:
            chosen["encoder.labels"] = config.encoder.labels
    chosen["privacy.encoder"] = config.privacy.encoder
    chosen["privacy.clip_norm"] = config.privacy.clip_norm
    if config.privacy.links_per_record is not None:
        chosen["privacy.links_per_record"] = config.privacy.links_per_record
    chosen["linkage.choose"] = config.linkage.choose
    return chosen


PRETENDED: Final = "pretended"
"""Name of pretended secondaries, before their number."""

# Of the columns, so many in a hundred are set aside; rounded down.
_ASIDE: Final = 50
_SMALLEST: Final = 1e-9


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Draw of columns for pretended secondaries, with the parties' tables."""

    seed: int
    """Seed of columns, orders and the keys' noise."""

    tables: Mapping[str, PartyTable]
    """Table of each party; the primary's has its remaining columns."""

    own: tuple[str, ...]
    """Columns that the primary keeps."""

    aside: Mapping[str, tuple[str, ...]]
    """Columns of each pretended secondary."""

    bounds: Mapping[str, Mapping[str, tuple[float, float]]]
    """Range of each feature of each pretended secondary."""

    taken: tuple[str, ...]
    """Columns whose range was taken from the table, since none is declared."""

    predictable_share: float
    """Share of the variance of the features set aside that a linear model of the primary's
    remaining columns explains."""


@dataclass(frozen=True, kw_only=True)
class RehearsedRun:
    """One simulated run of a cast."""

    seed: int
    epsilon: float | None
    """None: without noise."""

    metric: str
    """Metric of ``alone`` and ``test``."""

    alone: float
    """Test figure of the primary alone, on the columns that were left to it."""

    test: float
    """Test figure of the answering model: the joint one, or the primary alone."""

    gain: float
    """Gain from partners, positive is better: of ``test`` over ``alone`` and over every placebo,
    whichever is less."""

    used: str
    """``"joint"`` or ``"alone"``."""


def set_aside(
    config: FederationConfig, table: PartyTable, *, seed: int, key_noise: float = 0.0
) -> Cast:
    """Assign half of the columns to pretended secondaries, at most as many as the file has.

    There are fewer where a secondary would get fewer features than its encoder writes numbers.

    Args:
        config: The federation file.
        table: The primary's whole table.
        seed: Seed of the assignment, the order of records, and the noise on keys.
        key_noise: Deviation of the noise on the pretended secondaries' numeric keys, in deviations
            of each key.

    Raises:
        ConfigError: If noise is asked for on keys that are no numbers.
        DataError: If the primary has fewer than two columns beside key and label.
    """
    columns = _features_by_column(table)
    if len(columns) < 2:
        raise DataError(
            f"table of {table.name!r}: has {len(columns)} column beside key and label, and a "
            f"rehearsal needs two: one to keep and one to set aside; --seeds 0 leaves it out"
        )
    names = list(columns)
    drawn = [names[i] for i in stream(seed, "rehearsal", "columns").permutation(len(names))]
    aside = drawn[: max(1, len(drawn) * _ASIDE // 100)]
    parts = _assign_columns(config, aside, columns)
    own = [name for name in names if name not in aside]
    ranges, taken = _ranges(config, table, aside, columns)
    left = _with_columns(table, own, columns)
    tables = {table.name: left}
    for number, part in enumerate(parts, 1):
        name = f"{PRETENDED}-{number}"
        tables[name] = _secondary(
            _with_columns(table, part, columns), name, seed=seed, key_noise=key_noise
        )
    given = {f"{PRETENDED}-{number}": tuple(part) for number, part in enumerate(parts, 1)}
    return Cast(
        seed=seed,
        tables=tables,
        own=tuple(own),
        aside=given,
        bounds={
            name: {feature: ranges[feature] for group in part for feature in columns[group]}
            for name, part in given.items()
        },
        taken=taken,
        predictable_share=_explained_share(left, _with_columns(table, aside, columns)),
    )


def rehearsal_config(
    config: FederationConfig, cast: Cast, epsilon: float | None
) -> FederationConfig:
    """Return the federation of a cast, with the planned settings and noise.

    Raises:
        ConfigError: If the settings do not go with what is pretended.
        PrivacyError: If a promise would not hold for any partner.
    """
    source = merge_settings(config.source, settings_for(config, epsilon))
    hidden = _fitting_width(parse_federation(source, file="rehearsal"), cast)
    primary = next(party for party in source["party"] if party["role"] == "primary")
    helpers = [party for party in source["party"] if party["role"] in ("coordinator", "dealer")]
    pretended = [
        {
            "name": name,
            "role": "secondary",
            "data": primary["data"],
            "key": list(primary["key"]),
            "scaling": "bounds",
            "bounds": {feature: list(pair) for feature, pair in bounds.items()},
        }
        for name, bounds in cast.bounds.items()
    ]
    source["party"] = [primary, *pretended, *helpers]
    source["federation"] = {**source["federation"], "seed": cast.seed}
    # Kept links would be those of other keys; other methods are not rehearsed.
    source["linkage"] = {k: v for k, v in source["linkage"].items() if k != "cache"}
    source.pop("methods", None)
    if hidden is not None:
        source["model"] = {**source["model"], "hidden": hidden}
        source["model"].pop("heads", None)
    if source["model"].get("top") == "mixed":
        # Its trees would take as long as the rest of all rehearsals.
        source["model"] = {**source["model"], "top": "tied"}
    rehearsal = parse_federation(source, file="rehearsal")
    require_covered_channels(rehearsal)
    return rehearsal


def rehearse(
    config: FederationConfig,
    table: PartyTable,
    epsilons: Sequence[float | None],
    *,
    seeds: int,
    key_noise: float = 0.0,
    done: Callable[[RehearsedRun], None] = lambda _: None,
) -> tuple[list[Cast], list[RehearsedRun]]:
    """Simulate every epsilon with every seed; columns, splits and weights are drawn by seed.

    Args:
        config: The federation file.
        table: The primary's whole table.
        epsilons: Epsilons; None is a run without noise.
        seeds: Number of seeds, counting up from the file's.
        key_noise: As for :func:`set_aside`.
        done: Callback for each run.

    Returns:
        One cast a seed, and the runs; those of one seed share rows and columns, so that gains are
        paired.

    Raises:
        SecureVflError: As :func:`set_aside`, :func:`rehearsal_config` and a simulation; nothing was
            simulated where settings are at fault.

    Reveals:
        Nothing leaves the process, which holds the primary's table alone.
    """
    first = config.federation.seed
    casts = [
        set_aside(config, table, seed=seed, key_noise=key_noise)
        for seed in range(first, first + seeds)
    ]
    files = [
        [(epsilon, rehearsal_config(config, cast, epsilon)) for epsilon in epsilons]
        for cast in casts
    ]
    played = []
    for cast, runs in zip(casts, files, strict=True):
        alone = math.nan
        base: Base | None = None
        for number, (epsilon, rehearsal) in enumerate(runs):
            # Alone sees neither partners nor noise: once a seed is enough.
            result = _simulate(rehearsal, cast, with_alone=number == 0, fitted=base)
            base, metrics = result.base, result.metrics
            alone = metrics["alone_test"] if number == 0 else alone
            run_result = RehearsedRun(
                seed=cast.seed,
                epsilon=epsilon,
                metric=metrics["metric"],
                alone=alone,
                test=metrics["test"],
                gain=_of_partners(metrics, alone),
                used="joint" if metrics.get("base") is None else metrics["base"]["used"],
            )
            played.append(run_result)
            done(run_result)
    return casts, played


def _of_partners(metrics: Mapping[str, Any], alone: float) -> float:
    """Return the lesser gain by partners: over the local baseline, or over every placebo."""
    joint = metrics.get("base") is None or metrics["base"]["used"] == "joint"
    placebos = (
        [placebo[metrics["metric"]] for placebo in metrics["placebos"].values()] if joint else []
    )
    sign = 1 if metrics["higher_is_better"] else -1
    return min(sign * (metrics["test"] - placebo) for placebo in (alone, *placebos))


def _simulate(
    config: FederationConfig, cast: Cast, *, with_alone: bool, fitted: Base | None
) -> RunResult:
    with tempfile.TemporaryDirectory(prefix="securevfl-") as folder:
        return simulate_federation(
            config,
            cast.tables,
            RunOptions(run_folder=Path(folder), fitted_base=fitted),
            with_alone=with_alone,
            # Where the primary alone answers, there is no gain for a placebo to explain.
            with_placebo="joint",
            kept=False,
        )


def _schema(table: PartyTable) -> TableSchema:
    """Return the schema of a table that was read from a file."""
    if table.schema is None:
        raise DataError(f"table of {table.name!r}: was not read from a file, and has no columns")
    return table.schema


def _features_by_column(table: PartyTable) -> dict[str, tuple[str, ...]]:
    return {column.name: features_of_column(column) for column in _schema(table).columns}


def _assign_columns(
    config: FederationConfig, aside: Sequence[str], columns: Mapping[str, Sequence[str]]
) -> list[list[str]]:
    """Return each partner's columns: rather fewer partners than fewer numbers of each."""
    numbers, _ = _numbers(config)
    parts: list[list[str]] = []
    for count in range(min(len(config.secondaries), len(aside)), 0, -1):
        parts = [list(part) for part in np.array_split(np.array(aside, dtype=object), count)]
        if min(sum(len(columns[name]) for name in part) for part in parts) >= numbers:
            break
    return parts


def _fitting_width(config: FederationConfig, cast: Cast) -> int | None:
    """Return ``model.hidden`` for the cast's secondaries; None keeps the file's."""
    numbers, blocks = _numbers(config)
    if numbers == 0:
        return None
    count = len(cast.aside)
    written = min(numbers, *(cast.tables[name].num_features for name in cast.aside))
    if written == numbers and (count == len(config.secondaries) or not blocks):
        return None
    return written * (count if blocks else 1)


def _numbers(config: FederationConfig) -> tuple[int, bool]:
    """Return the least features of a secondary, and whether each secondary has its own block."""
    if config.encoder is None or config.encoder_reads_labels:
        return 0, False
    _, width = config.family.cut_shape(config.model)
    blocks = config.encoder.in_blocks
    return (width // len(config.secondaries) if blocks else width), blocks


def _explained_share(left: PartyTable, aside: PartyTable) -> float:
    known = own_inputs(left).values
    # The projection onto columns of deviation 1 does not depend on their units.
    known = (known - known.mean(axis=0)) / np.maximum(known.std(axis=0), _SMALLEST)
    wanted = aside.features.astype(np.float64)
    deviation = wanted.std(axis=0)
    wanted = ((wanted - wanted.mean(axis=0)) / np.maximum(deviation, _SMALLEST))[:, deviation > 0]
    if not wanted.size:
        return 1.0
    basis, sizes, _ = np.linalg.svd(known, full_matrices=False)
    basis = basis[:, sizes > _SMALLEST * max(1.0, sizes.max(initial=0.0))]
    return float(np.square(basis.T @ wanted).sum() / np.square(wanted).sum())


def _ranges(
    config: FederationConfig,
    table: PartyTable,
    aside: Collection[str],
    columns: Mapping[str, Sequence[str]],
) -> tuple[dict[str, tuple[float, float]], tuple[str, ...]]:
    """Return the range of every feature set aside, and the columns that it was taken from."""
    declared = config.primary.bounds
    known = {} if declared is None else _schema(table).feature_bounds(declared)
    places = {name: place for place, name in enumerate(table.feature_names)}
    ranges, taken = {}, []
    for column in _schema(table).columns:
        if column.name not in aside:
            continue
        for feature, natural in zip(columns[column.name], _natural(column), strict=True):
            pair = known.get(feature) or natural
            if pair is None:
                values = table.features[:, places[feature]]
                low, high = float(values.min()), float(values.max())
                pair = (low, high if high > low else low + 1)
                taken.append(column.name)
            ranges[feature] = pair
    return ranges, tuple(dict.fromkeys(taken))


def _natural(column: Column) -> tuple[tuple[float, float] | None, ...]:
    return (*column.natural_bounds, *(((0.0, 1.0),) if column.flagged else ()))


def _with_columns(
    table: PartyTable, chosen: Sequence[str], columns: Mapping[str, Sequence[str]]
) -> PartyTable:
    schema = _schema(table)
    kept = [column for column in schema.columns if column.name in chosen]
    names = tuple(feature for column in kept for feature in columns[column.name])
    places = [table.feature_names.index(name) for name in names]
    return replace(
        table,
        feature_names=names,
        features=table.features[:, places],
        schema=replace(
            schema,
            columns=tuple(kept),
            data_dependent=tuple(
                dependence for dependence in schema.data_dependent if dependence.column in chosen
            ),
        ),
    )


def _secondary(table: PartyTable, name: str, *, seed: int, key_noise: float) -> PartyTable:
    """Return the table of a pretended secondary, its records in an order of their own."""
    random = stream(seed, "rehearsal", "keys", name)
    links = table.link_columns
    if links is not None:
        if key_noise:
            raise ConfigError(
                "--key-noise: goes with keys that are numbers without gaps, and "
                f"{', '.join(links.columns)} are compared otherwise; leave it out"
            )
        links = KeyTable(name=name, columns=links.columns, entities=links.entities)
    keys = table.keys
    if key_noise and table.key_dim:
        noised = keys + key_noise * keys.std(axis=0) * random.normal(size=keys.shape)
        # Within the table's own: agreed ranges, and degrees, end somewhere.
        keys = np.clip(noised, keys.min(axis=0), keys.max(axis=0))
    order = random.permutation(table.num_rows)
    pretended = replace(
        table,
        name=name,
        keys=keys,
        labels=None,
        labelled=None,
        split_by=None,
        classes=None,
        # Its ranges are declared as those of features: a pretended partner has no columns.
        schema=None,
        link_columns=links,
    )
    return pretended.take(order)
