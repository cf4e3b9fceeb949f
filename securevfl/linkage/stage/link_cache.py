"""Saved links: reuse between runs, with the noise of their similarities.

The party that knows the distances computes them: the secondary without protection, the coordinator
under one. The primary gets each row's similarities in falling order and no record numbers; the
secondary's links are put into the same order, so that the two belong together.

Similarities whose noise is drawn anew in every run average out to the exact ones. So what was
noised is kept in the party's own folder ``linkage.cache``, if there is one, or else in the run's
own folder, by a key of everything that it depends on.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from securevfl.core.checks import strict_json
from securevfl.core.errors import DataError
from securevfl.core.files import require_unpackable, write_arrays, write_bytes
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import NO_RECORD, LinkTable, SimilarityScale
from securevfl.linkage.sampling import most_pairs
from securevfl.linkage.spec import CACHE_FOLDER, LinkSpec
from securevfl.linkage.stage.candidates import Candidates, tells_apart
from securevfl.linkage.stage.messages import Lists
from securevfl.linkage.stage.noised_similarities import SimilarLinks, similar_links

_TAG_KEY_BYTES: Final = 32
_MOST_OF_FIGURES: Final = 65_536
_MOST_RECORDS: Final = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CachedLinks:
    """The K nearest records of every primary row, with distances, and what was made of them."""

    links: LinkTable
    """Exact links."""

    similar: SimilarLinks | None
    """Noised similarities, where the family reads them."""

    @property
    def ranked_links(self) -> LinkTable:
        """The links in the order in which the secondary gets them."""
        return self.links if self.similar is None else self.similar.links


@dataclass(frozen=True, slots=True)
class LinkCache:
    """Files of kept links in one folder."""

    folder: Path | None
    """Folder of the links; None keeps none."""

    @classmethod
    def of_party(
        cls, spec: LinkSpec, name: str, folder: Path | None, *, data_root: Path | None
    ) -> "LinkCache":
        """Return the cache of one party: in its data root, or in its own folder of the run.

        Without a folder in the data root, a run keeps nothing that is quicker made than read.
        """
        if data_root is not None and (data_root / CACHE_FOLDER).is_dir():
            return cls(data_root / CACHE_FOLDER / name)
        if (
            spec.keys.metric.quick
            and spec.hiding.protection == "none"
            and spec.similarities is None
        ):
            return cls(None)
        return cls(folder)

    def get(self, key: str, make: Callable[[], CachedLinks]) -> CachedLinks:
        """Return the links of a key, made and kept if there are none yet.

        Raises:
            DataError: If the file is something else.
        """
        if self.folder is None:
            return make()
        path = self.folder / f"links-{key[:16]}.npz"
        if path.exists():
            return _load(path, key)
        kept = make()
        _save(path, kept, key)
        return kept

    def has(self, key: str) -> bool:
        """Whether links of that key are kept."""
        return self.folder is not None and (self.folder / f"links-{key[:16]}.npz").exists()


def links_to_cache(spec: LinkSpec, find: Callable[[], Candidates]) -> CachedLinks:
    """Find the K nearest candidates of every row and make similarities where they are wanted.

    Raises:
        DataError: If keys are not what the metric needs, or all distances are equal.
        ConfigError: If the bound tau cannot be had.
    """
    # Links of all rows are cached, with or without samples later.
    links = find().links(None, spec.choice.neighbours)
    return CachedLinks(links=links, similar=similar_links(spec, links))


def coordinate(
    spec: LinkSpec, find: Callable[[], Candidates], *, records: int, cache: LinkCache, key: str
) -> tuple[Lists, SimilarLinks | None]:
    """Do a coordinator's part: find candidates and, where wanted, make similarities.

    Returns:
        The secondary's lists, an order without distances, and the primary's similarities.

    Raises:
        DataError: If keys are not what the metric needs.
        ConfigError: If the bound tau cannot be had.
    """
    if not spec.choice.is_fixed:
        ranked, similar = find(), None
    else:
        kept = cache.get(key, lambda: links_to_cache(spec, find))
        ranked, similar = kept.ranked_links, kept.similar
    apart = tells_apart(spec, ranked.links(None, spec.choice.neighbours))
    cap = spec.choice.links_per_record
    most = most_pairs(rows=ranked.num_rows, records=records, cap=cap)
    return Lists(candidates=ranked.without_distances(), apart=apart, most=most), similar


def table_tag(folder: Path | None, units: np.ndarray) -> str:
    """Return a name for quantised keys that only this party could make, the same in every run.

    Args:
        folder: Where the party keeps the tag's own key; without one every tag is new.
        units: The keys.

    Reveals:
        To a coordinator that gets it: whether keys are the same as in an earlier run.
    """
    key = os.urandom(_TAG_KEY_BYTES)
    if folder is not None:
        path = folder / "tag.key"
        if not path.exists():
            write_bytes(path, key)
        key = path.read_bytes()
    return hashlib.blake2b(units.tobytes(), key=key, digest_size=32).hexdigest()


def links_key(spec: LinkSpec, *tables: KeyTable | np.ndarray, secret: str = "") -> str:
    """Return the key of links: everything that they and their similarities depend on.

    Args:
        spec: Settings of the linkage; the linkage table, K, caps, the largest distance and the
            split of rows count.
        tables: What was linked: both parties' keys or codes.
        secret: A check value of the linkage secret.
    """
    split, limit = spec.split, spec.choice.max_distance
    settings = {
        "linkage": dict(spec.written),
        "similarities": spec.similarities is not None,
        "neighbours": spec.choice.neighbours,
        # Without a limit the key is what it was, so that kept noise stays in use.
        **({"max_distance": limit} if limit < math.inf else {}),
        "cap": spec.choice.links_per_record,
        "split": split and [split.seed, split.validation_fraction, split.test_fraction],
        "secret": secret,
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode())
    for table in tables:
        columns = [table] if isinstance(table, np.ndarray) else list(table.columns.values())
        for column in columns:
            raw = (
                "\x1f".join(map(repr, column.tolist())).encode()
                if column.dtype == object
                else np.ascontiguousarray(column).tobytes()
            )
            digest.update(f"{column.dtype} {column.shape} {len(raw)} ".encode())
            digest.update(raw)
    return digest.hexdigest()


def _save(path: Path, kept: CachedLinks, key: str) -> None:
    arrays = {"indices": kept.links.indices, "distances": kept.links.distances}
    figures: dict[str, object] = {"key": key}
    if kept.similar is not None:
        scale = kept.similar.scale
        arrays |= {
            "similar_indices": kept.similar.links.indices,
            "similar_distances": kept.similar.links.distances,
            "values": kept.similar.values,
        }
        figures |= {
            "mean": scale.mean,
            "deviation": scale.deviation,
            "whole": scale.whole_distances,
            "noise_std": kept.similar.noise_std,
        }
    text = np.frombuffer(json.dumps(figures).encode(), dtype=np.uint8)
    write_arrays(path, {"figures": text, **arrays})


def _table(indices: np.ndarray, distances: np.ndarray) -> LinkTable:
    """Return kept links.

    Raises:
        ValueError: If they are invalid.
    """
    if indices.size and not NO_RECORD <= indices.min() <= indices.max() < _MOST_RECORDS:
        raise ValueError("an impossible record number")
    return LinkTable(indices=_of_type(indices, np.int64), distances=_of_type(distances, np.float64))


def _of_type(array: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    if array.dtype != dtype:
        raise ValueError(f"{array.dtype} where {dtype.__name__} was kept")
    return array


def _open_archive(file: BinaryIO) -> Any:
    """Return numpy's reader of an archive that is no larger in memory than on the disk."""
    require_unpackable(file)
    return np.load(file, allow_pickle=False)


def _load(path: Path, key: str) -> CachedLinks:
    try:
        with path.open("rb") as file, _open_archive(file) as archive:
            text = archive["figures"]
            if text.nbytes > _MOST_OF_FIGURES:
                raise ValueError("figures of too many bytes")
            figures = strict_json(text.tobytes(), depth=1)
            if figures["key"] != key:
                raise DataError(f"links {path}: belong to other keys; remove the file")
            similar = None
            if "values" in archive:
                similar = SimilarLinks(
                    links=_table(archive["similar_indices"], archive["similar_distances"]),
                    values=_of_type(archive["values"], np.float32),
                    scale=SimilarityScale(
                        mean=figures["mean"],
                        deviation=figures["deviation"],
                        whole_distances=figures["whole"],
                    ),
                    noise_std=float(figures["noise_std"]),
                )
                if similar.values.shape != similar.links.indices.shape:
                    raise ValueError("similarities of other links")
            return CachedLinks(
                links=_table(archive["indices"], archive["distances"]), similar=similar
            )
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - numpy and zipfile raise many kinds
        raise DataError(
            f"links {path}: is damaged or not a file of links ({type(error).__name__}); restore it "
            f"from a copy. Without a copy, remove it: links are then made anew, and similarities "
            f"get fresh noise, which reveals more to a party that saw the old ones"
        ) from None
