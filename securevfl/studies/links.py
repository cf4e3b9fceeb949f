"""Linkage alone: every secondary's links, how good they are, and what each party would learn."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import key_spec, link_spec
from securevfl.config.parties import PartySettings
from securevfl.config.rules import require_enough_records
from securevfl.core import files
from securevfl.core.memory import peak_memory_bytes
from securevfl.core.progress import LinksMade, Observer, Stage
from securevfl.core.summary import Summarised
from securevfl.data.tables import KeyTable
from securevfl.linkage.estimate import estimated_improvement
from securevfl.linkage.links import LinkTable, empty_links
from securevfl.linkage.metrics.metric import KeyMetric
from securevfl.linkage.quality import link_quality
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.candidates import Candidates, find_candidates
from securevfl.linking.in_process import Linker
from securevfl.linking.kept_links import KeptLinks, LinkCache, keep
from securevfl.linking.key_reading import read_keys
from securevfl.linking.link_counts import same_keys, tied_beyond
from securevfl.linking.protections.table import protection_of, reveals_of
from securevfl.linking.similar_links import stacked
from securevfl.runtime.figures import finite_or_none

# Rows are linked in parts of so many pairs, for the progress to move.
_PART_PAIRS: Final = 2**24
_MOST_PARTS: Final = 200

# Points of a curve: more can't be seen.
_CURVE_POINTS: Final = 400


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LinkStudy(Summarised):
    """What ``securevfl link`` found."""

    figures: dict[str, Any]
    """What ``links.json`` holds: figures by secondary, never a row or a record."""

    curves: dict[str, list[float]]
    """By secondary, the similarities of its links (negative distances) in falling order."""

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return which secondaries were linked; the figures are in ``figures``."""
        return f"links of {', '.join(self.curves)}", {}


def study_links(
    config: FederationConfig,
    data_root: Path,
    folder: Path,
    *,
    estimate: bool,
    observe: Observer,
) -> LinkStudy:
    """Link every secondary in this process, write each party's lists, measure them.

    Links that an earlier call left in the folder are not made again.

    Args:
        config: The federation file; truth is used where it names a column for it.
        data_root: Where relative paths start.
        folder: Gets ``links.json`` and a folder for each party.
        estimate: Whether FedSim's Delta is estimated too.
        observe: Hears of progress.

    Raises:
        ConfigError: If the linkage secret cannot be read, or a bound not be had.
        DataError: If a table can't be linked.

    Reveals:
        Nothing leaves the process, which holds everybody's table. Each party's folder gets what
        that party would learn between processes.
    """
    primary = _read(config, config.primary, data_root)
    spec = link_spec(config)
    protection = protection_of(spec)
    link = Linker(spec, primary, data_root=data_root, folder=folder / "parties")
    secondaries: dict[str, Any] = {}
    curves, values = {}, []
    linked = np.ones(primary.num_rows, dtype=np.bool_)
    for party in config.secondaries:
        own = _read(config, party, data_root)
        kept, told, seconds, cached = _link(link, spec, primary, own, folder, observe)
        quality = link_quality(
            kept.links,
            num_records=own.num_rows,
            primary_entities=primary.entities,
            record_entities=own.entities,
            tied_beyond=tied_beyond(kept.links, same_keys(spec.keys, own)),
        ).as_json()
        secondaries[party.name] = {
            **quality,
            "seconds": seconds,
            "cached": cached,
            "distance_unit": protection.unit(spec),
            "similarities": None if kept.similar is None else kept.similar.figures(),
            "reveals": reveals_of(spec, "secondary"),
            **told,
            **({"delta": _deltas(kept.links)} if estimate else {}),
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


def _read(config: FederationConfig, party: PartySettings, data_root: Path) -> KeyTable:
    keys = read_keys(
        key_spec(config),
        data_root / party.data,
        name=party.name,
        columns=party.key,
        truth=config.linkage.truth,
        reading=party.reading,
    )
    if party.role == "secondary":
        require_enough_records(config, keys)
    return keys


def _link(
    link: Linker,
    spec: LinkSpec,
    primary: KeyTable,
    own: KeyTable,
    folder: Path,
    observe: Observer,
) -> tuple[KeptLinks, dict[str, Any], float, bool]:
    started = time.monotonic()
    observe(Stage(text=f"linking {own.name}"))
    cache = LinkCache(folder / "parties" / own.name)
    if spec.cache is not None:
        cache = link.cache(own)
    key = link.key(own)
    cached = cache.has(key)
    # What was compared is kept beside the links, for a call that does not make them again.
    told = folder / "parties" / own.name / f"comparing-{key[:16]}.json"

    def find() -> Candidates:
        metric = link.metric(own)
        figures = {**metric.figures(), **protection_of(spec).figures(spec, primary, own)}
        files.write_json(told, figures)
        if spec.choice.links_per_record is not None:
            return find_candidates(spec, metric)
        links = _in_parts(metric, spec.choice.neighbours, own.name, observe)
        return Candidates(ranked=links.within(spec.choice.max_distance))

    kept = cache.get(key, lambda: keep(spec, find))
    comparing = files.read_json(told) if told.exists() else {}
    return kept, comparing, round(time.monotonic() - started, 3), cached


def _in_parts(metric: KeyMetric, k: int, name: str, observe: Observer) -> LinkTable:
    rows = np.arange(metric.num_rows, dtype=np.int64)
    # A part of few rows would cost an index more to set up than to search.
    step = max(_PART_PAIRS // metric.num_records, len(rows) // _MOST_PARTS, 1)
    if len(rows) <= step:
        return metric.nearest(None, k)
    indices, distances = empty_links(len(rows), k)
    for start in range(0, len(rows), step):
        part = metric.nearest(rows[start : start + step], k)
        done = min(start + step, len(rows))
        indices[start:done], distances[start:done] = part.indices, part.distances
        observe(LinksMade(name=name, done=done, of=len(rows)))
    return LinkTable(indices=indices, distances=distances)


def _write_lists(spec: LinkSpec, folder: Path, kept: KeptLinks) -> None:
    """Write what the secondary gets: record numbers in order; distances if it could know them."""
    links = kept.links if kept.similar is None else kept.similar.links
    arrays = {"indices": links.indices}
    if not protection_of(spec).helpers:
        arrays["distances"] = links.distances
    files.write_arrays(folder / "lists.npz", arrays)


def _write_primary(spec: LinkSpec, folder: Path, values: list[Any]) -> None:
    similarities = stacked(values)
    if similarities is not None:
        files.write_arrays(folder / "similarities.npz", {"values": similarities})
    figures = {"reveals": reveals_of(spec, "primary"), "similarities": similarities is not None}
    files.write_json(folder / "links.json", figures)


def _deltas(links: LinkTable) -> dict[str, float]:
    return {
        "exact": estimated_improvement(links, over="exact"),
        "top1sim": estimated_improvement(links, over="top1sim"),
        "avgsim": estimated_improvement(links, over="avgsim"),
    }


def _curve(links: LinkTable) -> list[float]:
    distances = links.distances[links.present]
    distances.sort()
    places = np.linspace(0, len(distances) - 1, min(_CURVE_POINTS, len(distances)))
    curve: list[float] = (-distances[np.rint(places).astype(np.int64)]).tolist()
    return curve
