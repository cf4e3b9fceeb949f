"""Joint models, the local baseline and placebos on a dozen tables: results, gains, plot.

    SECUREVFL_DATA=... python research/results/beside_alone.py [SET[:ROWS] ...] [--methods A,B,...]
        [--out DIR] [--seeds 5] [--rows N] [--base B] [--jobs N] [--plot FILE.svg] [--keep]

Without noise. A gain is over the local baseline; what of it is the partners' is over the better of
two placebos: the same network without partners, and partners' rows permuted. Each set gets a folder
in DIR with its tables and two federation files, one for encoders that are trained and one for
frozen ones, and ``securevfl lab compare`` runs on both; finished runs are not trained again.
``--keep`` writes each set's figures to ``research/results/figures/``.
``--list`` says which sets there are; digits, diabetes and sklearn need no ``SECUREVFL_DATA``.
"""

import argparse
import contextlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w

sys.path.append(str(Path(__file__).parents[2]))

from research.common.figure_files import OF_A_RUN, keep
from research.common.full_tables import load_full
from research.common.linked_tables import Tables, fate, letter, places, synthetic
from research.common.panels import panels_of, save
from securevfl.config.sections import BaseSettings
from securevfl.data.tables import PartyTable
from securevfl.lab.datasets import load_builtin, split_table
from securevfl.lab.study_commands import compare

MADE_SEED = 0
"""Of who gets which columns, and of the keys' noise; seeds of runs change rows and models."""

TRAINED = (
    "alone", "boosting", "solo", "top1sim", "fedsim", "fet",
    "boosting-links", "combine", "boosting-combine",
)  # fmt: skip
FROZEN = ("releases", "releases-1")
"""Boosted trees on own columns, keys and what secondaries have released once: the mean of as many
linked records as others read, or the nearest record alone."""


def dealt(name: str, parties: int, neighbours: int, most: int | None) -> Callable[..., Tables]:
    """Return a maker of a table whose columns are dealt out by FeT's protocol."""

    def make(*, rows: int | None) -> Tables:
        table = load_full(name) if name in ("letter", "mnist") else load_builtin(name)
        number = min(rows or len(table.y), most or len(table.y))
        chosen = np.random.default_rng(MADE_SEED).permutation(len(table.y))[:number]
        own = split_table(
            table.X[chosen],
            np.asarray(table.y)[chosen],
            parties=parties,
            key_dim=8 if name == "mnist" else 4,
            seed=MADE_SEED,
            task=table.task,
        )
        return Tables(parties=own, task=table.task, neighbours=neighbours, truth=True)

    return make


VIEWS = ("fou", "mor", "zer", "kar", "pix", "fac")
"""Of mfeat, the primary's first."""


def views(*, rows: int | None) -> Tables:
    """Return mfeat's six views, one a party, with ids that are equal everywhere.

    The primary has the Fourier coefficients. Its rows are sorted by class, so ids are drawn.
    """
    table = load_full("mfeat")
    drawn = np.random.default_rng(MADE_SEED)
    chosen = drawn.permutation(len(table.y))[:rows]
    ids = drawn.permutation(len(table.y))
    parties = []
    for number, view in enumerate(VIEWS):
        columns = table.views[view]
        order = chosen if number == 0 else np.random.default_rng(number).permutation(chosen)
        parties.append(
            PartyTable(
                name=view,
                key_names=("id",),
                keys=ids[order][:, None].astype(np.float64),
                feature_names=tuple(f"{view}_{i}" for i in range(len(columns))),
                features=table.X[order][:, list(columns)].astype(np.float32),
                labels=np.asarray(table.y)[order].astype(np.int64) if number == 0 else None,
                classes=tuple(range(10)) if number == 0 else None,
                entities=order.astype(np.int64),
            )
        )
    return Tables(parties=parties, task="multiclass", neighbours=1, truth=True)


def linked(make: Callable[..., Tables]) -> Callable[..., Tables]:
    """Return a maker of one of FedSim's pairs, without noise on keys."""
    return lambda *, rows: make(rows=rows, key_noise=0.0)


SETS: dict[str, Callable[..., Tables]] = {
    "digits": dealt("digits", 5, 4, None),
    "diabetes": dealt("diabetes", 2, 4, None),
    "mnist10": dealt("mnist", 10, 4, 6_000),
    "mnist28": dealt("mnist", 28, 4, 6_000),
    "mfeat": views,
    "fate_breast": linked(lambda **more: fate("fate_breast", "binary", **more)),
    "fate_vehicle": linked(lambda **more: fate("fate_vehicle", "multiclass", **more)),
    "letter": linked(letter),
    "sklearn": linked(lambda **more: synthetic(random_keys=False, **more)),
    "hdb": linked(lambda **more: places("hdb", **more)),
    "house_kc": linked(lambda **more: places("house_kc", **more)),
}


def maker_of(name: str) -> Callable[..., Tables]:
    """Return the maker of a set, or of MNIST between any other number of parties.

    Raises:
        KeyError: If there is no such set.
    """
    parties = re.fullmatch(r"mnist(\d+)", name)
    if name not in SETS and parties:
        return dealt("mnist", int(parties[1]), 4, 6_000)
    return SETS[name]


def set_name(text: str) -> str:
    """Return NAME or NAME:ROWS as it is, as an argument.

    Raises:
        argparse.ArgumentTypeError: If there is no such set.
    """
    name, _, rows = text.partition(":")
    try:
        maker_of(name)
        int(rows or 0)
    except (KeyError, ValueError):
        known = ", ".join(SETS)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no set; there are {known}, and mnistN; a number of rows may follow, "
            "as in hdb:20000"
        ) from None
    return text


def write_set(folder: Path, name: str, tables: Tables, options: argparse.Namespace) -> list[Path]:
    """Write the parties' tables and both federation files."""
    folder.mkdir(parents=True, exist_ok=True)
    parties = []
    for number, table in enumerate(tables.parties):
        party = "secondary" if number and len(tables.parties) == 2 else table.name
        party = party if number else "primary"
        columns = dict(zip(table.key_names, table.keys.T, strict=True))
        columns |= dict(zip(table.feature_names, table.features.T, strict=True))
        if tables.truth:
            columns["entity"] = table.entities
        if table.labels is not None:
            classes = table.classes
            columns["y"] = table.labels if classes is None else np.asarray(classes)[table.labels]
        pd.DataFrame(columns).to_csv(folder / f"{party}.csv", index=False)
        parties.append(
            {
                "name": party,
                "role": "secondary" if number else "primary",
                "data": f"{party}.csv",
                "key": list(table.key_names),
                "scaling": tables.scaling,
                **({} if number else {"label": "y", "address": "127.0.0.1:0"}),
            }
        )
    exact = tables.neighbours == 1
    common: dict[str, Any] = {
        "federation": {"name": name, "task": tables.task, "seed": 0},
        "training": {
            "epochs": options.epochs,
            "batch_size": 128,
            "learning_rate": 3e-3,
            "weight_decay": 1e-4,
            "patience": 5,
        },
        "linkage": {
            "protection": "none",
            **({"truth": "entity"} if tables.truth else {}),
            **({"metric": "exact"} if exact else {}),
        },
        "base": {"estimator": options.base},
        "party": parties,
    }
    model: dict[str, Any] = {"neighbours": tables.neighbours, "keys_as_features": not exact}
    trained = {
        **common,
        # Ids that are equal tell no similarity, which fedsim reads.
        "model": {"family": "avgsim" if exact else "fedsim", **model},
        "privacy": {"mechanism": "none", "encoder": "trained"},
    }
    # As many numbers from each secondary as the narrowest of them has, 16 at most.
    width = min(16, *(table.num_features for table in tables.parties[1:]))
    released = {"release": "pooled", "top": "boosting", "hidden": width * len(parties[1:])}
    frozen = {
        **common,
        "model": {"family": "fet", **released, "heads": 1, **model},
        "encoder": {"method": "principal", "layout": "blocks"},
        "privacy": {"mechanism": "none", "encoder": "frozen"},
        "methods": {
            "releases": {"family": "fet"},
            "releases-1": {"family": "fet", "neighbours": 1},
        },
    }
    paths = []
    for kind, source in (("trained", trained), ("frozen", frozen)):
        paths.append(folder / f"{kind}.toml")
        paths[-1].write_text(tomli_w.dumps(source), encoding="utf-8")
    return paths


def measure(asked: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Compare the methods on one set, NAME or NAME:ROWS; return each one's figures."""
    name, _, rows = asked.partition(":")
    folder = options.out / asked.replace(":", "-")
    tables = maker_of(name)(rows=int(rows or options.rows) or None)
    files = write_set(folder, name, tables, options)
    found: dict[str, dict[str, Any]] = {}
    for path, known in zip(files, (TRAINED, FROZEN), strict=True):
        methods = [one for one in options.methods or (*TRAINED, *FROZEN) if one in known]
        if not methods:
            continue
        out = folder / path.stem
        # With --json nothing but JSON stands on stdout.
        with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
            compare(
                path,
                methods=",".join(methods),
                seeds=options.seeds,
                jobs=options.jobs,
                out=out,
                as_json=False,
            )
        comparison = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
        for method, figures in comparison["methods"].items():
            sign = 1 if comparison["higher_is_better"] else -1
            placebo = comparison["differences"].get("placebo", {}).get(method)
            found[method] = {
                **figures,
                "metric": comparison["metric"],
                "sign": sign,
                "partners": None if placebo is None else [sign * one for one in placebo["seeds"]],
            }
    return found


def gains(found: Mapping[str, dict[str, Any]], method: str) -> list[float]:
    """Return what a method gains over the local baseline, by seed; positive is better."""
    pairs = zip(found[method]["seeds"], found["alone"]["seeds"], strict=True)
    return [found[method]["sign"] * (own - alone) for own, alone in pairs]


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def print_table(name: str, found: Mapping[str, dict[str, Any]]) -> None:
    metric = next(iter(found.values()))["metric"]
    print(
        f"\n**{name}**, test {metric}\n\n| method | test | gain over the local baseline | of which "
        "the partners' |\n| --- | --- | --- | --- |"
    )
    for method, figures in found.items():
        digits = 2 if metric in ("rmse", "mae") else 3
        values = figures["seeds"]
        text = (
            f"| {method} | {statistics.mean(values):.{digits}f} ± {deviation(values):.{digits}f} |"
        )
        if method == "alone" or "alone" not in found:
            print(f"{text} | |")
            continue
        cells = [
            ""
            if own is None
            else f"{statistics.mean(own):+.{digits}f} ± {deviation(own):.{digits}f}"
            for own in (gains(found, method), figures["partners"])
        ]
        print(f"{text} {' | '.join(cells)} |")


def draw(results: Mapping[str, Mapping[str, dict[str, Any]]], path: Path) -> None:
    """Draw each method's gain and the partners' part, a panel a set; bars are deviations."""
    figure, panels = panels_of(len(results), most=4, size=(3.4, 2.6))
    for axes, (name, found) in zip(panels, results.items(), strict=True):
        methods = [method for method in found if method != "alone"][::-1]
        own = [gains(found, method) for method in methods]
        axes.barh(
            methods,
            [statistics.mean(one) for one in own],
            xerr=list(map(deviation, own)),
            color="0.8",
            label="gain over the local baseline",
        )
        placed = [(one, found[one]["partners"]) for one in methods if found[one]["partners"]]
        axes.barh(
            [one for one, _ in placed],
            [statistics.mean(partners) for _, partners in placed],
            xerr=[deviation(partners) for _, partners in placed],
            height=0.4,
            color="#2f5d8a",
            label="of which the partners'",
        )
        axes.axvline(0, color="0.2", linewidth=1)
        metric = next(iter(found.values()))["metric"]
        axes.set_title(f"{name}, {metric}", fontsize=8)
        axes.tick_params(labelsize=7)
    panels[0].legend(fontsize=6)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "sets",
        nargs="*",
        type=set_name,
        help=f"of {', '.join(SETS)}, which are the default; or mnistN, N parties",
    )
    parser.add_argument("--list", action="store_true", help="say which sets there are, and end")
    parser.add_argument("--out", type=Path, default=Path("runs/beside-alone"))
    parser.add_argument("--methods", type=lambda text: text.split(","), help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=20_000, help="0 takes all")
    parser.add_argument("--base", default=BaseSettings().estimator, help="base.estimator")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to figures/")
    options = parser.parse_args()
    if options.list:
        print("\n".join(SETS))
        return
    results = {name: measure(name, options) for name in options.sets or SETS}
    if options.keep:
        for name, found in results.items():
            kept = ("metric", "sign", "seeds", "partners")
            keep(
                f"beside-alone-{name.replace(':', '-')}",
                {method: {one: of[one] for one in kept} for method, of in found.items()},
                seeds=list(range(options.seeds)),
                code=(*OF_A_RUN, "securevfl/lab", "research/fedsim/tables.py"),
            )
    if options.plot is not None:
        draw(results, options.plot)
    if options.json:
        print(json.dumps(results))
        return
    for name, found in results.items():
        print_table(name, found)


if __name__ == "__main__":
    main()
