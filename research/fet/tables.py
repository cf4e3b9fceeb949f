"""FeT's departures from its paper one at a time, and its alignment of positional encodings.

    [SECUREVFL_DATA=...] python research/fet/tables.py departures TABLE [--seeds 5]
    [SECUREVFL_DATA=...] python research/fet/tables.py positions TABLE [--seeds 5]

``departures`` changes one setting at a time to the paper's value, and then all of them.
``positions`` is the ablation behind the paper's Figure 4: encodings that start equal or not,
averaged or not. TABLE is ``digits`` (five parties, FeT's protocol), ``mnist``, ``gisette`` (the
same on 4,000 rows) or ``house_kc`` (two parties, 4,000 rows). Differences to the first line are
paired by seed.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2]))

from research.common.folder_tables import load_folder
from research.common.full_tables import load_full
from research.fet.uneven import split_unevenly
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core.conventions import derive_seed
from securevfl.data.tables import PartyTable
from securevfl.lab.datasets import load_builtin, split_table
from securevfl.models.fet.family import FeTFamily
from securevfl.models.fet.positions import fourier_positions
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.layers import initialise
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import RunResult, simulate_federation

ROWS: Final = 4_000
# A clip that does not bite: what the paper calls "without privacy mechanisms".
UNCLIPPED: Final = {"privacy.clip_norm": 1000.0}
_FORM: Final = (
    *("norm", "activation", "mask_reads", "ranked", "memory_norm", "fourier_octaves"),
    *("positions_start", "average_positions_every"),
)
_PRESET: Final = FeTFamily.presets["paper"].model
# The network's form alone: sizes stay ours.
PAPER: Final[dict[str, Any]] = {**{name: _PRESET[name] for name in _FORM}, **UNCLIPPED}
DEPARTURES: Final[dict[str, dict[str, Any]]] = {
    "as it is": {},
    "the paper's form": PAPER,
    **{f"{name} = {value}": {name: value} for name, value in PAPER.items()},
    "memory_norm = False, clip_norm = 1000": {"memory_norm": False, **UNCLIPPED},
    "own_clip_norm = 1": {"own_clip_norm": 1.0},
    "training.optimizer = lamb": {"training.optimizer": "lamb"},
}
STARTS: Final[dict[str, dict[str, Any]]] = {
    f"{start}, {'averaged' if every else 'not averaged'}": {
        "positions_start": start,
        "average_positions_every": every,
    }
    for start, every in itertools.product(("shared", "separate"), (0, 1))
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Tables, and the settings that every line of a study shares."""

    tables: list[PartyTable]
    task: str
    neighbours: int
    epochs: int
    bounds: tuple[float, float] | None = None
    """Declared of every column; None where columns have none in common."""


def study_of(
    name: str,
    *,
    seed: int,
    parties: int = 5,
    key_noise: float = 0.05,
    rows: int = ROWS,
    by: str = "random",
    weights: float | None = None,
) -> Study:
    """Return the tables of a study; all but ``rows`` is of those that are dealt out."""
    if name == "house_kc":
        primary, secondary = load_folder(name)
        chosen = np.sort(np.random.RandomState(0).permutation(primary.num_rows)[:rows])
        assert primary.labels is not None
        primary = dataclasses.replace(
            primary,
            keys=primary.keys[chosen],
            features=primary.features[chosen],
            labels=primary.labels[chosen],
        )
        return Study(tables=[primary, secondary], task="regression", neighbours=10, epochs=8)
    table = load_builtin(name) if name == "digits" else load_full(name)
    chosen = np.random.RandomState(0).permutation(len(table.y))[:rows]
    X, y = table.X[chosen], table.y[chosen]
    tables = (
        split_table(X, y, parties=parties, key_noise=key_noise, seed=seed, task=table.task)
        if by == "random"
        else split_unevenly(
            X,
            y,
            parties=parties,
            by=by,
            weights=weights,
            key_noise=key_noise,
            seed=seed,
            task=table.task,
        )
    )
    bounds = {"digits": (-6.0, 16.0), "gisette": (-1.0, 1.0)}.get(name, (0.0, 255.0))
    return Study(tables=tables, task=table.task, neighbours=5, epochs=12, bounds=bounds)


def federation(study: Study, changed: Mapping[str, Any], *, seed: int) -> FederationConfig:
    """Return the file of a run; ``changed`` names fields of ``[model]``, or SECTION.FIELD.

    None leaves a field out; ``party.FIELD`` is every party's.
    """
    parties = [
        {
            "name": table.name,
            "role": "secondary" if number else "primary",
            "data": f"{table.name}.csv",
            "key": list(table.key_names),
            "scaling": "clamped",
            **({} if number else {"label": "y", "address": "127.0.0.1:0"}),
        }
        for number, table in enumerate(study.tables)
    ]
    source: dict[str, Any] = {
        "federation": {"name": "fet", "task": study.task, "seed": seed},
        "model": {"family": "fet", "neighbours": study.neighbours},
        "training": {
            "epochs": study.epochs,
            "batch_size": 128,
            "learning_rate": 2e-3,
            "patience": study.epochs,
        },
        "base": {"estimator": "none"},
        "privacy": {"mechanism": "none", "encoder": "trained"},
        "linkage": {"protection": "none"},
        "party": parties,
    }
    for name, value in changed.items():
        section, _, field = name.rpartition(".")
        for part in parties if section == "party" else [source[section or "model"]]:
            part[field] = value
            if value is None:
                del part[field]
    return parse_federation(source, file="fet")


def run(name: str, changed: Mapping[str, Any], *, seed: int, out: Path) -> RunResult:
    study = study_of(name, seed=seed)
    return simulate_federation(
        federation(study, changed, seed=seed),
        {table.name: table for table in study.tables},
        RunOptions(run_folder=out),
        with_alone=False,
    )


def departures(name: str, seeds: Sequence[int], only: Sequence[str]) -> None:
    base: list[float] = []
    for line, changed in DEPARTURES.items():
        if line not in ("as it is", *(only or DEPARTURES)):
            continue
        values = []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                metrics = run(name, changed, seed=seed, out=Path(folder)).metrics
            values.append(float(metrics["test"]))
        base = base or values
        print(f"| {line} | {spread(values)} | {paired(values, base)} |", flush=True)


def positions(name: str, seeds: Sequence[int]) -> None:
    base: list[float] = []
    for line, changed in STARTS.items():
        values, likeness = [], []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                metrics = run(name, changed, seed=seed, out=Path(folder)).metrics
                study = study_of(name, seed=seed)
                model = federation(study, changed, seed=seed).model
                assert isinstance(model, FeTConfig)
                names = [table.name for table in study.tables]
                grid = key_grid(study.tables[0].key_dim)
                before = [drawn(model, seed, party, grid) for party in names]
                best = f"best-{metrics['best_epoch']}.pt"
                files = [Path(folder) / "parties" / party / best for party in names]
                after = [kept(model, file, grid) for file in files]
            values.append(float(metrics["test"]))
            likeness.append([*alike(grid, before), *alike(grid, after)])
        base = base or values
        cells = " | ".join(f"{value:+.2f}" for value in np.mean(likeness, axis=0))
        print(f"| {line} | {cells} | {spread(values)} | {paired(values, base)} |", flush=True)


_GRID: Final = 625
_REACH: Final = 2.0
# In more dimensions, a grid of three steps a side would have thousands of keys.
_MOST_GRID_DIMENSIONS: Final = 6


def key_grid(key_dim: int) -> Tensor:
    """Return about 600 synthetic keys within two standard deviations.

    They form a grid or, in more than six dimensions, are random; the same in every run, from no
    table.
    """
    if key_dim <= _MOST_GRID_DIMENSIONS:
        axis = torch.linspace(-_REACH, _REACH, round(_GRID ** (1 / key_dim)))
        return torch.cartesian_prod(*[axis] * key_dim).view(-1, key_dim)
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.rand(_GRID, key_dim, generator=generator) - 1) * _REACH


def distance_correlation(
    keys: Tensor,
    first: Tensor,
    second: Tensor,
) -> float | None:
    """Return the correlation of keys' distances with the distances of their encodings.

    It correlates ||x - y|| with ||first(x) - second(y)|| over all pairs of keys (x, y); None if
    either is constant. ``first`` and ``second`` are the encodings of one party or of two.

    References:
        [FeT] section 5.1, Figure 4.
    """
    apart = torch.stack([torch.cdist(keys, keys), torch.cdist(first, second)]).flatten(1)
    correlation = float(torch.corrcoef(apart)[0, 1])
    return correlation if -2 < correlation < 2 else None


def alike(keys: Tensor, encodings: Sequence[Tensor]) -> list[float]:
    """Return how alike parties' encodings of the same keys are, by three numbers.

    The mean cosine between two parties; and, as in the paper's Figure 4, how keys' distances
    correlate with those of their encodings, within a party and between two.
    """
    pairs = list(itertools.combinations(encodings, 2))
    cosine = np.mean([float(torch.cosine_similarity(a, b).mean()) for a, b in pairs])

    def correlation(a: Tensor, b: Tensor) -> float:
        return distance_correlation(keys, a, b) or 0.0

    within = np.mean([correlation(one, one) for one in encodings])
    return [float(cosine), float(within), float(np.mean([correlation(*pair) for pair in pairs]))]


def drawn(model: FeTConfig, run_seed: int, party: str, grid: Tensor) -> Tensor:
    """Return a party's encodings of the grid before training."""
    whose = [] if model.positions_start == "shared" else [party]
    seed = derive_seed(run_seed, "init", "positions", *whose)
    positions = fourier_positions(model, grid.shape[1])
    initialise(positions, seed=seed, positions_seed=seed)
    return positions(grid).detach()


def kept(model: FeTConfig, file: Path, grid: Tensor) -> Tensor:
    """Return a party's encodings of the grid by the weights of its best epoch."""
    weights = torch.load(file)["state"]
    where = "embedding.positions."
    positions = fourier_positions(model, grid.shape[1])
    positions.load_state_dict(
        {key.removeprefix(where): value for key, value in weights.items() if key.startswith(where)}
    )
    return positions(grid).detach()


def spread(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.4g} ± {deviation:.2g}"


def paired(values: Sequence[float], base: Sequence[float]) -> str:
    if values is base:
        return ""
    gaps = [one - other for one, other in zip(values, base, strict=True)]
    deviation = statistics.stdev(gaps) if len(gaps) > 1 else float("nan")
    return f"{round(statistics.mean(gaps), 6):+.2g} ± {deviation:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=["departures", "positions"])
    parser.add_argument("table", choices=["digits", "mnist", "gisette", "house_kc"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="lines of departures; default: all")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.study == "departures":
        departures(options.table, seeds, options.only)
    else:
        positions(options.table, seeds)


if __name__ == "__main__":
    main()
