"""Targets of what a party keeps: states of a run, links, models."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import torch
from helpers.fuzzing.files import RUN, SEALED, folder, frozen_plan, moded, unlike
from helpers.fuzzing.mutation import altered_tree, as_json, havoc
from helpers.fuzzing.target import Broken, Target
from helpers.kept import FEATURES, KEYS, kept, write_kept_run

from securevfl.config.federation import FederationConfig
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.federation.build import build_top
from securevfl.federation.checkpoint import Checkpoints, StateFolder
from securevfl.federation.rounds.cached_release import CachedRelease
from securevfl.federation.rounds.kept_rounds import CachedRows
from securevfl.federation.saved_model import SavedModel, load_model
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.links import LinkTable, SimilarityScale
from securevfl.linkage.sampling import FixedLinks
from securevfl.linkage.stage.link_cache import CachedLinks, LinkCache
from securevfl.linkage.stage.noised_similarities import SimilarLinks
from securevfl.models.alone.margins import MarginModel, NetworkModel
from securevfl.models.layers import MLP

_STATES: Final = ("epoch-1.pt", "released/1.pt", "release.pt", "answers/1.pt")


def _layer() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2)


def _saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@cache
def _state_seeds() -> list[bytes]:
    stamp = {"settings_digest": "abc", "run": RUN, "ledger_head": ""}
    weights = dict(_layer().state_dict())
    rows = torch.arange(3)
    states: tuple[dict[str, Any], ...] = (
        {**weights, "rests_on": None},
        {"rows": rows, "aggregate": torch.zeros(3, 2, 2)},
        {
            "encoder": weights,
            "links": {
                "indices": torch.zeros(4, 2, dtype=torch.int64),
                "distances": torch.zeros(4, 2, dtype=torch.float64),
            },
            "digest": "d" * 64,
        },
        {"place": 0, "rows": rows, "words": torch.arange(5)},
    )
    return [
        moded(SEALED | number << 1, _saved({**stamp, "state": state}))
        for number, state in enumerate(states)
    ]


def _read_state(data: bytes) -> None:
    mode, content = (data[0], data[1:]) if data else (0, b"")
    name = _STATES[(mode >> 1) % len(_STATES)]
    place = folder() / "runs" / "bank"
    path = place / name
    for other in _STATES:
        (place / other).unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(content).digest() if mode & SEALED else b""
    path.write_bytes(content + digest)
    files = StateFolder(place, settings_digest="abc")
    files.run = RUN
    _STATE_READERS[name](files)


def _read_epoch(files: StateFolder) -> None:
    checkpoints = Checkpoints(files.path, settings_digest="abc")
    checkpoints.resume()
    if not checkpoints.epochs():
        return
    model = _layer()

    def into(state: dict[str, Any]) -> None:
        weights = {name: state[name] for name in model.state_dict()}
        model.load_state_dict(weights)

    checkpoints.load(1, into)


def _read_rows(files: StateFolder) -> None:
    kept = CachedRows(files, [np.arange(3)], shape=(2, 2))
    if not kept.missing():
        kept.keep(0, kept.all())
        unlike(
            "rows", kept.all().tolist(), CachedRows(files, kept.parts, shape=(2, 2)).all().tolist()
        )


def _read_release(files: StateFolder) -> None:
    ledger = Ledger(None, party="bank", plan=frozen_plan(), noise_share_std=1.0)
    table = LinkTable(indices=np.zeros((4, 2), dtype=np.int64), distances=np.zeros((4, 2)))
    kept = CachedRelease(
        files,
        ledger,
        bottom=_layer(),
        links=FixedLinks(table=table),
        records={"features": torch.zeros(3, 2)},
        fit=None,
    )
    kept.again(np.arange(3))
    kept.settle()
    kept.link(np.arange(3))
    kept.restore()


def _read_answer(files: StateFolder) -> None:
    ledger = Ledger(None, party="bank", plan=frozen_plan(), noise_share_std=1.0)
    ledger.charge(round_number=1, rows=np.arange(3), purpose="train")
    table = LinkTable(indices=np.zeros((4, 2), dtype=np.int64), distances=np.zeros((4, 2)))
    kept = CachedRelease(
        files, ledger, bottom=_layer(), links=FixedLinks(table=table), records={}, fit=None
    )
    words = kept.again(np.arange(3))
    if words is not None:
        kept.keep_answer(np.arange(3), words)


_STATE_READERS: Final[Mapping[str, Callable[[StateFolder], None]]] = {
    "epoch-1.pt": _read_epoch,
    "released/1.pt": _read_rows,
    "release.pt": _read_release,
    "answers/1.pt": _read_answer,
}


def _altered_state(data: bytes, random: Random) -> bytes:
    """Alter what is in a file, as whoever may write it can."""
    try:
        tree = torch.load(io.BytesIO(data[1:]), weights_only=True)
    except Exception:
        return random.choice(_state_seeds())
    mode = data[0] if random.random() < 0.8 else random.randrange(2 * len(_STATES))
    try:
        made = _saved(altered_tree(stirred(tree, random), random))
    except Exception:  # what torch itself would not alter or write
        return havoc(data, random)
    return moded(mode | SEALED, made)


def stirred(tree: Any, random: Random) -> Any:
    """Return a tree some of whose tensors are others."""
    if isinstance(tree, dict):
        return {name: stirred(value, random) for name, value in tree.items()}
    if isinstance(tree, list):
        return [stirred(value, random) for value in tree]
    if not isinstance(tree, torch.Tensor) or tree.numel() > 1000 or random.random() < 0.6:
        return tree
    match random.randrange(8):
        case 0:
            return tree.to(random.choice((torch.float16, torch.int8, torch.complex64, torch.bool)))
        case 1:
            return tree.reshape(-1)[: random.randrange(4)]
        case 2:
            return tree.unsqueeze(0)
        case 3:  # a view of one number that says it is 4 TiB
            return torch.zeros(1, dtype=tree.dtype).expand(random.choice((7, 2**20, 2**40)))
        case 4:
            return tree.to_sparse() if tree.ndim and tree.dtype != torch.bool else tree
        case 5 if tree.is_floating_point():
            return torch.full_like(tree, random.choice((torch.nan, torch.inf, 1e38)))
        case 5:
            return torch.full_like(tree, random.choice((-1, 100, 2**31)))
        case 6:
            return torch.nn.Parameter(tree) if tree.is_floating_point() else tree
        case _:
            return tree.tolist()


_KEY: Final = "k" * 64


def _links(*, similar: bool) -> CachedLinks:
    indices = np.array([[0, 2], [1, -1]])
    table = LinkTable(indices=indices, distances=np.array([[0.0, 0.5], [1.0, np.inf]]))
    values = np.array([[0.5, 0.25], [0.125, np.nan]], dtype=np.float32)
    scale = SimilarityScale(mean=-1.0, deviation=0.5, whole_distances=False)
    made = SimilarLinks(links=table, values=values, scale=scale, noise_std=0.5)
    return CachedLinks(links=table, similar=made if similar else None)


def _links_file() -> Path:
    return folder() / f"links-{_KEY[:16]}.npz"


def _links_seeds() -> list[bytes]:
    path, made = _links_file(), []
    for similar in (False, True):
        path.unlink(missing_ok=True)
        found = _links(similar=similar)
        LinkCache(folder()).get(_KEY, lambda found=found: found)  # type: ignore[misc]
        made.append(path.read_bytes())
    return made


def _arrays_of(found: CachedLinks) -> list[tuple[Any, ...]]:
    tables = [found.links] + ([] if found.similar is None else [found.similar.links])
    arrays = [array for table in tables for array in (table.indices, table.distances)]
    if found.similar is not None:
        arrays.append(found.similar.values)
    return [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]


def _read_links(data: bytes) -> None:
    path = _links_file()
    path.write_bytes(data)

    def never() -> CachedLinks:
        raise Broken("links that lie there were made anew")

    first = LinkCache(folder()).get(_KEY, never)
    kinds = [kind for kind, _, _ in _arrays_of(first)]
    unlike("the types of links", ["<i8", "<f8", "<i8", "<f8", "<f4"][: len(kinds)], kinds)
    path.unlink()
    LinkCache(folder()).get(_KEY, lambda: first)
    unlike("links", _arrays_of(first), _arrays_of(LinkCache(folder()).get(_KEY, never)))


def _altered_links(data: bytes, random: Random) -> bytes:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception:
        return havoc(data, random)
    if not arrays:
        return random.choice(_links_seeds())
    name = random.choice(list(arrays))
    if name == "figures":
        text = as_json(altered_tree(json.loads(arrays[name].tobytes()), random))
        arrays[name] = np.frombuffer(text, dtype=np.uint8)
    else:
        array = arrays.pop(name)
        choices: tuple[Callable[[], Any], ...] = (
            lambda: array.astype(random.choice(("<f4", ">i8", "i2", "U8", "c8", "?"))),
            lambda: array.reshape(-1),
            lambda: array[:1],
            lambda: np.full_like(array, random.choice((-5, 0, 7))),
            lambda: array[..., None],
        )
        if random.random() < 0.9:
            arrays[name] = random.choice(choices)()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


_BUNDLE: Final = (
    *("model.json", "weights.safetensors", "base.skops", "alone.safetensors", "keys.json"),
)


@cache
def _federation() -> FederationConfig:
    place = folder() / "kept"
    place.mkdir(exist_ok=True)
    return write_kept_run(place, task="binary")


def _bundle_of(place: Path) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in _BUNDLE if (place / name).exists()}


def _bundled(mode: int, parts: Mapping[str, bytes]) -> bytes:
    """Return a folder's files as one input."""
    made = [
        bytes([_BUNDLE.index(name)]) + len(data).to_bytes(4, "little") + data
        for name, data in parts.items()
    ]
    return moded(mode, b"".join(made))


def _unbundled(data: bytes) -> tuple[int, dict[str, bytes]]:
    mode, rest = (data[0], data[1:]) if data else (0, b"")
    parts = {}
    while len(rest) >= 5:
        length = int.from_bytes(rest[1:5], "little")
        parts[_BUNDLE[rest[0] % len(_BUNDLE)]] = rest[5 : 5 + length]
        rest = rest[5 + length :]
    return mode, parts


@cache
def _model_seeds() -> list[bytes]:
    from sklearn.linear_model import LogisticRegression

    config, place = _federation(), folder() / "seed"
    whole = kept(config, "agency")
    assert whole.primary is not None, "the agency is the primary"
    head = whole.primary.head
    values = np.array([[0.0, 1.0], [1.0, 0.0], [2.0, 1.0], [0.5, 3.0]])
    fitted = LogisticRegression().fit(values, [0, 1, 1, 0])
    network = NetworkModel(
        network=MLP(2, (3,), head.outputs).double().eval(),
        hidden=(3,),
        mean=np.zeros(2),
        deviation=np.ones(2),
        head=head,
        best_epoch=1,
        epochs=1,
    )
    names = np.array(["Ann", None], dtype=object)
    part = replace(
        whole.primary,
        base=MarginModel(estimator=fitted, head=head, words_as_one=False),
        alone=network,
        keys=KeyTable(name="agency", columns={"lon": np.array([0.5, 1.5]), "name": names}),
    )
    made = []
    for model in (whole, replace(whole, primary=part)):
        model.save(place)
        parts = _bundle_of(place)
        made += [_bundled(mode, parts) for mode in (0, SEALED)]
        for path in place.iterdir():
            path.unlink()
    return made


def _resealed(parts: dict[str, bytes]) -> None:
    """Make the hashes in a description right, as whoever may write the folder can."""
    try:
        content = json.loads(parts["model.json"])
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}
        content["weights"] = digests.get("weights.safetensors")
        part = content["primary"]
        part["keys"] = part["keys"] and digests.get("keys.json")
        for name in ("base", "alone"):
            if part[name]:
                part[name]["sha256"] = digests.get(str(part[name].get("file")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    else:
        parts["model.json"] = json.dumps(content).encode()


def _read_model(data: bytes) -> None:
    mode, parts = _unbundled(data)
    if mode & SEALED:
        _resealed(parts)
    config, place, again = _federation(), folder() / "model", folder() / "again"
    for path in (*place.glob("*"), *again.glob("*")):
        path.unlink()
    place.mkdir(exist_ok=True)
    for name, content in parts.items():
        (place / name).write_bytes(content)
    model = load_model(place, config, party="agency")
    model.into(_top())
    model.save(again)
    second = load_model(again, config, party="agency")
    unlike("a model", _meaning(model), _meaning(second))


@cache
def _top() -> torch.nn.Module:
    config = _federation()
    table = PartyTable(
        name="agency",
        key_names=("lon", "lat"),
        keys=np.zeros((1, KEYS)),
        feature_names=tuple(f"x{axis}" for axis in range(FEATURES)),
        features=np.zeros((1, FEATURES), dtype=np.float32),
    )
    return build_top(config, table, kept(config, "agency").head)


def _meaning(model: SavedModel) -> str:
    plain = {
        name: getattr(model, name)
        for name in ("party", "role", "run", "family", "settings", "features", "schema", "version")
    }
    weights = {name: repr(value.tolist()) for name, value in model.weights.items()}
    part = model.primary
    own = None if part is None else (part.head, part.classes, part.threshold, part.scale, part.used)
    return repr((plain, sorted(weights.items()), own, model.key_scale))


def _altered_model(data: bytes, random: Random) -> bytes:
    mode, parts = _unbundled(data)
    if not parts:
        return random.choice(_model_seeds())
    name = random.choice(("model.json", random.choice(list(parts))))
    content = parts.get(name, b"")
    try:
        if name == "model.json":
            parts[name] = as_json(altered_tree(json.loads(content), random))
        elif name.endswith(".safetensors"):
            length = int.from_bytes(content[:8], "little")
            header = as_json(altered_tree(json.loads(content[8 : 8 + length]), random))
            parts[name] = len(header).to_bytes(8, "little") + header + content[8 + length :]
        elif name.endswith(".skops"):
            parts[name] = _altered_estimator(content, random)
        else:
            parts[name] = havoc(content, random)
    except (ValueError, zipfile.BadZipFile, KeyError):
        parts[name] = havoc(content, random)
    return _bundled(random.choice((mode, SEALED)), parts)


def _altered_estimator(content: bytes, random: Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(list(members))
    if name == "schema.json":
        members[name] = as_json(altered_tree(json.loads(members[name]), random))
    else:
        members[name] = havoc(members[name], random)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return buffer.getvalue()


KEPT_FILES: Final = (
    Target(name="state", seeds=_state_seeds, read=_read_state, mutate=_altered_state),
    Target(
        name="links",
        seeds=_links_seeds,
        read=_read_links,
        words=(b"'descr': '|O'", b"'shape': (1099511627776,)", b"PK\x03\x04", b"\x80\x04K\x01."),
        mutate=_altered_links,
    ),
    Target(
        name="model",
        seeds=_model_seeds,
        read=_read_model,
        words=(b"os.system", b"builtins.eval", b"/dev/zero", b"[" * 2000, b"1e999"),
        mutate=_altered_model,
        seconds=5.0,
        room=192 << 20,
    ),
)
