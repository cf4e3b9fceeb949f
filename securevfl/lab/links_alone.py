"""Linkage without training: links of every secondary and their quality."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from securevfl.config.federation import FederationConfig, key_spec, link_spec
from securevfl.config.rules import require_enough_records, require_own_files
from securevfl.config.sections import PartySettings
from securevfl.core import files
from securevfl.core.formatting import Summarised, finite_or_none
from securevfl.core.memory import peak_memory_bytes
from securevfl.core.progress import LinksMade, Observer, Stage
from securevfl.data.tables import KeyTable
from securevfl.lab.link_quality import estimated_improvement, link_quality
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import ComparedKeys
from securevfl.linkage.protections.protection import stack_similarities
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.candidates import Candidates, find_candidates, same_keys, tied_beyond
from securevfl.linkage.stage.link_cache import CachedLinks, LinkCache, links_to_cache
from securevfl.linkage.stage.linkage_parts import protection_of, reveals_of
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import read_keys

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
    config: FederationConfig,
    data_root: Path,
    folder: Path,
    *,
    estimate: bool,
    observe: Observer,
) -> LinkStudy:
    """Link every secondary in this process, write each party's lists, and measure the links.

    Links that an earlier call left in the folder are not made again.

    Args:
        config: The federation; its column of true matches is used if there is one.
        data_root: Folder at which relative paths start.
        folder: Folder for ``links.json`` and the parties' folders.
        estimate: Whether FedSim's Delta is estimated too.
        observe: Receives progress events.

    Raises:
        ConfigError: If the linkage secret cannot be read, or a bound not be had.
        DataError: If a table can't be linked.

    Reveals:
        Nothing leaves the process, which holds all tables. Each party's folder gets what that party
        would learn between processes.
    """
    require_own_files(config, data_root)
    primary = _read(config, config.primary, data_root)
    spec = link_spec(config)
    protection = protection_of(spec)
    link = Linker(spec, primary, data_root=data_root, folder=folder / "parties")
    secondaries: dict[str, Any] = {}
    curves, values = {}, []
    linked = np.ones(primary.num_rows, dtype=np.bool_)
    for party in config.secondaries:
        own = _read(config, party, data_root)
        kept, comparison_figures, seconds, cached = _link(link, spec, primary, own, folder, observe)
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
            **comparison_figures,
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
