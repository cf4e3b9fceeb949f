"""Linkage without training: links of every secondary and their quality."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.config.federation import FederationConfig, key_spec, link_spec
from securevfl.config.rules import require_enough_records, require_own_files
from securevfl.config.sections import PartySettings
from securevfl.core import files
from securevfl.core.errors import DataError
from securevfl.core.formatting import Summarised, finite_or_none
from securevfl.core.memory import peak_memory_bytes
from securevfl.core.progress import LinksMade, Observer, Stage, Warned
from securevfl.data.tables import KeyTable
from securevfl.lab.one_run import kept_or_temporary
from securevfl.linkage.links import NO_RECORD, LinkTable
from securevfl.linkage.metrics.metric import ComparedKeys
from securevfl.linkage.protections.protection import stack_similarities
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.candidates import Candidates, find_candidates, same_keys, tied_beyond
from securevfl.linkage.stage.link_cache import CachedLinks, LinkCache, links_to_cache
from securevfl.linkage.stage.linkage_parts import protection_of, reveals_of
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import read_keys
from securevfl.runtime.run_folder import require_own_folder
from securevfl.runtime.run_options import FederationSource, resolve_federation

_TOP: Final = 10
_ROWS_OF_A_PIECE: Final = 2**16
_QUANTILES: Final = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def link_quality(
    links: LinkTable,
    *,
    num_records: int,
    primary_entities: Int64[np.ndarray, " rows"] | None = None,
    record_entities: Int64[np.ndarray, " records"] | None = None,
    tied_beyond: Bool[np.ndarray, " rows"] | None = None,
) -> dict[str, Any]:
    """Measure links; no figure names a row or a record.

    Args:
        links: The links.
        num_records: Records of the secondary.
        primary_entities: True entity of each primary row.
        record_entities: True entity of each record; several may share one.
        tied_beyond: Rows whose last link has the same key as a record beyond K.

    Returns:
        ``rows`` of the primary, ``records`` of the secondary, ``links_per_row`` (K);
        ``rows_with_a_match``, whose entity has a record, and of these ``recall_at_1``, the share
        whose first link is a true match, and ``recall_at_k``, that has one among its links;
        ``pairs_completeness``, the share of all true pairs that are linked (these four are None
        without truth); ``reduction_ratio``, the share of all pairs that linkage ruled out;
        ``rows_short``, with fewer than K links; ``rows_without_links``; ``tied_rows``, with two
        equally far links, or whose last link has the key of a record that is left out;
        ``records_used``, with a link; ``most_used``, the number of rows of each of the ten most
        used records; and quantiles over rows of the first and the last link's distance,
        ``first_distance_quantiles`` and ``last_distance_quantiles``.

    Raises:
        DataError: If truth is given for one party only, or has the wrong length.
    """
    if (primary_entities is None) != (record_entities is None):
        raise DataError("truth: must be known at both parties or at none")
    present = links.present
    per_row = present.sum(axis=1)
    used = np.bincount(links.indices[present], minlength=num_records)
    # Slots are filled from the left, so two neighbouring present slots are compared.
    equal = (links.distances[:, 1:] == links.distances[:, :-1]) & present[:, 1:]
    tied = equal.any(axis=1) if tied_beyond is None else equal.any(axis=1) | tied_beyond
    last = links.distances[np.arange(links.num_rows), np.maximum(per_row, 1) - 1]
    return {
        "rows": links.num_rows,
        "records": num_records,
        "links_per_row": links.num_links,
        **_against_truth(links, primary_entities, record_entities, num_records),
        "reduction_ratio": 1 - float(present.sum()) / (links.num_rows * num_records),
        "rows_short": int((per_row < links.num_links).sum()),
        "rows_without_links": int((per_row == 0).sum()),
        "tied_rows": int(tied.sum()),
        "records_used": int((used > 0).sum()),
        "most_used": np.sort(used)[::-1][:_TOP].tolist(),
        "first_distance_quantiles": _quantiles(links.distances[per_row > 0, 0]),
        "last_distance_quantiles": _quantiles(last[per_row > 0]),
    }


def _against_truth(
    links: LinkTable,
    primary_entities: Int64[np.ndarray, " rows"] | None,
    record_entities: Int64[np.ndarray, " records"] | None,
    num_records: int,
) -> dict[str, Any]:
    names = ("recall_at_1", "recall_at_k", "pairs_completeness", "rows_with_a_match")
    if primary_entities is None or record_entities is None:
        return dict.fromkeys(names)
    if len(primary_entities) != links.num_rows or len(record_entities) != num_records:
        raise DataError(
            f"truth: has {len(primary_entities)} rows and {len(record_entities)} records, "
            f"the links {links.num_rows} and {num_records}"
        )
    right = np.zeros(links.indices.shape, dtype=np.bool_)
    for start in range(0, links.num_rows, _ROWS_OF_A_PIECE):
        piece = slice(start, start + _ROWS_OF_A_PIECE)
        indices = links.indices[piece]
        # Where there is no link, -1 takes the last record for nothing.
        right[piece] = record_entities[indices] == primary_entities[piece, None]
        right[piece] &= indices != NO_RECORD
    entities, counts = np.unique(record_entities, return_counts=True)
    place = np.minimum(np.searchsorted(entities, primary_entities), len(entities) - 1)
    true_pairs = np.where(entities[place] == primary_entities, counts[place], 0)
    matchable = int((true_pairs > 0).sum())
    if matchable == 0:
        return dict.fromkeys(names[:3]) | {"rows_with_a_match": 0}
    return {
        "recall_at_1": float(right[:, 0].sum()) / matchable,
        "recall_at_k": float(right.any(axis=1).sum()) / matchable,
        "pairs_completeness": float(right.sum()) / int(true_pairs.sum()),
        "rows_with_a_match": matchable,
    }


def _quantiles(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    quantiles = np.quantile(values, _QUANTILES)
    return {f"{level:g}": float(value) for level, value in zip(_QUANTILES, quantiles, strict=True)}


# Rows are linked in parts of so many pairs, for the progress to move.
_PART_PAIRS: Final = 2**24
_MOST_PARTS: Final = 200

# Points of a curve: more can't be seen.
_CURVE_POINTS: Final = 400


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LinkStudy(Summarised):
    """Links of all secondaries, measured."""

    figures: dict[str, Any]
    """Content of ``links.json``: figures by secondary, never a row or a record."""

    curves: dict[str, list[float]]
    """By secondary, the similarities of its links (negative distances) in falling order."""

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return the linked secondaries' names; the figures are in ``figures``."""
        return f"links of {', '.join(self.curves)}", {}


def study_links(
    config: FederationConfig, data_root: Path, folder: Path, *, observe: Observer
) -> LinkStudy:
    """Link every secondary in this process, write each party's lists, and measure the links.

    Links that an earlier call left in the folder are not made again.

    Args:
        config: The federation; its column of true matches is used if there is one.
        data_root: Folder at which relative paths start.
        folder: Folder for ``links.json`` and the parties' folders.
        observe: Receives progress events.

    Raises:
        ConfigError: If the linkage secret cannot be read, or a bound not be had.
        DataError: If a table can't be linked.

    Reveals:
        Nothing leaves the process, which holds all tables. Each party's folder gets what that party
        would learn between processes.
    """
    require_own_files(config, data_root)
    primary = _read(config, config.primary, data_root, observe)
    spec = link_spec(config)
    protection = protection_of(spec)
    link = Linker(spec, primary, data_root=data_root, folder=folder / "parties")
    secondaries: dict[str, Any] = {}
    curves, values = {}, []
    linked = np.ones(primary.num_rows, dtype=np.bool_)
    for party in config.secondaries:
        own = _read(config, party, data_root, observe)
        kept, comparison_figures, seconds, cached = _link(link, spec, primary, own, folder, observe)
        quality = link_quality(
            kept.links,
            num_records=own.num_rows,
            primary_entities=primary.entities,
            record_entities=own.entities,
            tied_beyond=tied_beyond(kept.links, same_keys(spec.keys, own)),
        )
        secondaries[party.name] = {
            **quality,
            "seconds": seconds,
            "cached": cached,
            "distance_unit": protection.unit(spec),
            "similarities": None if kept.similar is None else kept.similar.figures(),
            "reveals": reveals_of(spec, "secondary"),
            **comparison_figures,
        }
        curves[party.name] = _curve(kept.links)
        linked &= kept.links.present.any(axis=1)
        values.append(None if kept.similar is None else kept.similar.values)
        _write_lists(spec, folder / "parties" / party.name, kept)
        files.write_json(folder / "parties" / party.name / "links.json", secondaries[party.name])
    _write_primary(spec, folder / "parties" / primary.name, values)
    figures = {
        "federation": config.federation.name,
        "metric": config.linkage.metric,
        "protection": config.linkage.protection,
        "rows": primary.num_rows,
        "links_per_row": config.model.neighbours,
        "max_distance": finite_or_none(spec.choice.max_distance),
        "rows_linked_everywhere": int(linked.sum()),
        "reveals": {
            role: reveals_of(spec, role) for role in ("primary", "secondary", *protection.helpers)
        },
        "secondaries": secondaries,
        "peak_memory_bytes": peak_memory_bytes(),
    }
    files.write_json(folder / "links.json", figures)
    return LinkStudy(figures=figures, curves=curves)


def _read(
    config: FederationConfig, party: PartySettings, data_root: Path, observe: Observer
) -> KeyTable:
    keys = read_keys(
        key_spec(config),
        data_root / party.data,
        name=party.name,
        columns=party.key,
        truth=config.linkage.truth,
        reading=party.reading,
    )
    for text in keys.notes:
        observe(Warned(text=f"{party.name}: {text}"))
    if party.role == "secondary":
        require_enough_records(config, keys)
    return keys


def _link(
    link: Linker, spec: LinkSpec, primary: KeyTable, own: KeyTable, folder: Path, observe: Observer
) -> tuple[CachedLinks, dict[str, Any], float, bool]:
    started = time.monotonic()
    observe(Stage(text=f"linking {own.name}"))
    cache = link.cache(own)
    if cache.folder is None:  # what is quickly made is kept too, for whoever looks at it
        cache = LinkCache(folder / "parties" / own.name)
    key = link.key(own)
    cached = cache.has(key)
    # What was compared is kept beside the links, for a call that does not make them again.
    figures_path = folder / "parties" / own.name / f"comparing-{key[:16]}.json"

    def find() -> Candidates:
        metric = link.metric(own)
        figures = {**metric.figures(), **protection_of(spec).figures(spec, primary, own)}
        files.write_json(figures_path, figures)
        if spec.choice.links_per_record is not None:
            return find_candidates(spec, metric)
        links = _in_parts(metric, spec.choice.neighbours, own.name, observe)
        return links.within(spec.choice.max_distance)

    kept = cache.get(key, lambda: links_to_cache(spec, find))
    comparing = files.read_json(figures_path) if figures_path.exists() else {}
    return kept, comparing, round(time.monotonic() - started, 3), cached


def _in_parts(metric: ComparedKeys, k: int, name: str, observe: Observer) -> LinkTable:
    rows = np.arange(metric.num_rows, dtype=np.int64)
    # A part of few rows would cost an index more to set up than to search.
    step = max(_PART_PAIRS // metric.num_records, len(rows) // _MOST_PARTS, 1)
    if len(rows) <= step:
        return metric.nearest(None, k)
    links = LinkTable.empty(len(rows), k)
    for start in range(0, len(rows), step):
        part = metric.nearest(rows[start : start + step], k)
        done = min(start + step, len(rows))
        links.put(slice(start, done), part)
        observe(LinksMade(name=name, done=done, of=len(rows)))
    return links


def _write_lists(spec: LinkSpec, folder: Path, kept: CachedLinks) -> None:
    """Write a secondary's lists: record numbers in order, and distances if it may know them."""
    links = kept.ranked_links
    arrays = {"indices": links.indices}
    if not protection_of(spec).helpers:
        arrays["distances"] = links.distances
    files.write_arrays(folder / "lists.npz", arrays)


def _write_primary(spec: LinkSpec, folder: Path, values: list[Any]) -> None:
    similarities = stack_similarities(values)
    if similarities is not None:
        files.write_arrays(folder / "similarities.npz", {"values": similarities})
    figures = {"reveals": reveals_of(spec, "primary"), "similarities": similarities is not None}
    files.write_json(folder / "links.json", figures)


def _curve(links: LinkTable) -> list[float]:
    distances = links.distances[links.present]
    distances.sort()
    places = np.linspace(0, len(distances) - 1, min(_CURVE_POINTS, len(distances)))
    curve: list[float] = (-distances[np.rint(places).astype(np.int64)]).tolist()
    return curve


def link(
    federation: FederationSource,
    *,
    out: Path | None = None,
    data_root: Path | None = None,
    observe: Observer = lambda _event: None,
) -> LinkStudy:
    """Link the tables of a federation in this process, and measure the quality of the links.

    Args:
        federation: Path of a federation file, or result of :func:`securevfl.read_federation`.
        out: Folder for every party's lists, which later calls reuse; default: a temporary one.
        data_root: Folder at which relative data paths start; default: that of the file, or the
            current one.
        observe: Receives progress events.

    Returns:
        Figures by secondary, never a row or a record, and the curves of similarities.

    Raises:
        ConfigError: If a setting is impossible.
        DataError: If a table can't be linked.

    Reveals:
        Nothing leaves the process, which holds all tables.
    """
    config, root = resolve_federation(federation, data_root, only_linkage=True)
    with kept_or_temporary(out) as folder:
        require_own_folder(config, folder)
        files.require_writable_folder(folder)
        return study_links(config, root, folder, observe=observe)
