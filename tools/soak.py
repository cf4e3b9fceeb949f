"""Let one run go on for long while its parties are hit, and say whether it stays as it was.

    python tools/soak.py --parties 4 --minutes 2       # a laptop has room for that
    python tools/soak.py --parties 30 --minutes 120 --plot soak.svg

One federation is trained between processes, as ``securevfl train`` does under
``on_loss = "wait"``, for as many epochs as fill the time. Every so often a party that the seed
draws is killed (and started again by the launcher), stopped until the primary notices, paused for
so short a time that nobody need notice, or has its connections shut down. Every few seconds the
memory and the open descriptors of every party are looked at.

In the end the run must have ended well with the figures of one that nobody disturbed, no ledger
may be below what has left, and neither memory nor descriptors may have grown: slopes are of each
process within itself, after its first minute and the run's first 150 epochs, in which allocators
fill their pools, with a 95 % interval over processes. What a party keeps of each epoch until the
run is over, its line of metrics and 64 bytes a line of the ledger, is no growth. Needs Linux.
"""

import argparse
import json
import math
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# Parties compute in one thread, and this process, which forks them all, has no other.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import numpy as np  # noqa: E402
from helpers.chaos.checks import ledger_faults  # noqa: E402
from helpers.chaos.soak import PRIMARY, WAYS, Sample, Soak, Soaked  # noqa: E402
from helpers.chaos.witness import Watch, notes_of  # noqa: E402
from helpers.undisturbed import undisturbed  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from securevfl.desk.report.plots import BLUE, GREY, ORANGE, SIZE, svg, title_axes  # noqa: E402
from securevfl.testing import write_federation  # noqa: E402

_ROWS: Final = 60
_FIGURES: Final = ("train", "validation", "test", "epochs", "best_epoch")
_WARMS_UP_S: Final = 60.0
_WARMS_UP_EPOCHS: Final = 150
_KEPT_KIB: Final = {"primary": 2.0, "secondaries": 1.0}
"""What a party keeps of an epoch, at most; the primary has the lines of metrics."""
# Epochs are chosen so that an undisturbed run would take this share of the time.
_SHARE: Final = 0.4
_CALIBRATING_EPOCHS: Final = 20
_RESAMPLES: Final = 2000


def _write(folder: Path, *, parties: int, epochs: int) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    runtime = {"on_loss": "wait", "wait_s": 600.0, "most_losses": 10**6, "join_timeout_s": 600.0}
    return write_federation(
        folder,
        secondaries=parties,
        rows=_ROWS,
        training={"epochs": epochs, "batch_size": 16, "patience": 10**6},
        runtime={**runtime, "round_timeout_s": 120.0},
    )


def _soak(
    folder: Path,
    *,
    parties: int,
    epochs: int,
    every_s: float,
    sample_s: float,
    seed: int,
    faults_s: float,
    most_s: float,
) -> Soaked:
    path = _write(folder, parties=parties, epochs=epochs)
    watch = Watch(notes=folder / "notes", out=folder / "run", files=False)
    soak = Soak(path, watch, every_s=every_s, sample_s=sample_s, seed=seed)
    return soak.run(faults_s=faults_s, most_s=most_s)


def _epochs(asked: argparse.Namespace) -> int:
    """Return how many epochs fill the time, by a short run that nobody disturbs."""
    quick = _soak(
        asked.folder / "calibrating",
        parties=asked.parties,
        epochs=_CALIBRATING_EPOCHS,
        every_s=0.0,
        sample_s=math.inf,
        seed=0,
        faults_s=0.0,
        most_s=1800.0,
    )
    if quick.ended is None or quick.ended.code:
        raise SystemExit(f"soak: not even an undisturbed run ended well: {quick.ended}")
    shutil.rmtree(asked.folder / "calibrating")
    an_epoch = (quick.epochs[-1] - quick.epochs[0]) / (_CALIBRATING_EPOCHS - 1)
    return max(_CALIBRATING_EPOCHS, round(_SHARE * 60 * asked.minutes / an_epoch))


def _slope(samples: Sequence[Sample], figure: str) -> dict[str, float] | None:
    """Return the slope an hour of a figure within processes, with an interval over processes.

    Each process counts by how long it was there; of one or two, eighths are resampled.
    """
    own: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for one in samples:
        own[one.pid].append((one.at / 3600, getattr(one, figure)))
    parts = []
    for series in own.values():
        first = series[0][0] + _WARMS_UP_S / 3600
        times, values = np.array([one for one in series if one[0] >= first]).reshape(-1, 2).T
        # Blocks of few processes, each with its own mean: neighbouring samples are alike.
        blocks = np.array_split(np.arange(len(times)), 8) if len(own) < 3 else []
        for rows in blocks or [np.arange(len(times))]:
            if len(rows) >= 3:
                centred = times[rows] - times[rows].mean()
                parts.append((float(centred @ values[rows]), float(centred @ centred)))
    if len(parts) < 3:
        return None
    products, squares = np.array(parts).T
    random = np.random.default_rng(0)
    drawn = random.integers(len(parts), size=(_RESAMPLES, len(parts)))
    slopes = products[drawn].sum(axis=1) / squares[drawn].sum(axis=1)
    low, high = np.quantile(slopes, (0.025, 0.975))
    return {
        "an_hour": float(products.sum() / squares.sum()),
        "low": float(low),
        "high": float(high),
        "processes": len(own),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "p50": float(np.quantile(values, 0.5)),
        "p99": float(np.quantile(values, 0.99)),
        "most": max(values),
    }


def _figures(soaked: Soaked, asked: argparse.Namespace, epochs: int) -> dict[str, Any]:
    noticed = {
        way: _quantiles(
            [f.noticed_s for f in soaked.faults if f.way == way and f.noticed_s is not None]
        )
        for way in WAYS
    }
    everyone = [f.noticed_s for f in soaked.faults if f.noticed_s is not None]
    goes_on = [f.going_on_s for f in soaked.faults if f.going_on_s is not None and f.noticed_s]
    # What comes behind the last epoch, reports for example, is done once.
    warm = soaked.epochs[_WARMS_UP_EPOCHS:][:1] or [0.0]
    end = max(soaked.epochs, default=0.0)
    training = [one for one in soaked.samples if warm[0] <= one.at < end]
    groups = {
        "primary": [one for one in training if one.party == PRIMARY],
        "secondaries": [one for one in training if one.party != PRIMARY],
    }
    together: dict[float, float] = defaultdict(float)
    for one in soaked.samples:
        together[one.at] += one.pss
    return {
        "parties": asked.parties,
        "epochs": epochs,
        "epochs_an_hour": 3600 * (len(soaked.epochs) - 1) / (end - soaked.epochs[0])
        if end
        else 0.0,
        "minutes": None if soaked.ended is None else soaked.ended.seconds / 60,
        "faults": {way: sum(f.way == way for f in soaked.faults) for way in WAYS},
        "sessions": len(soaked.losses) + 1,
        "noticed_s": {"all": _quantiles(everyone), **noticed},
        "going_on_s": _quantiles(goes_on),
        "together_mib": _quantiles(list(together.values())),
        "slopes": {
            name: {
                "memory_mib": _slope(samples, "own"),
                "descriptors": _slope(samples, "descriptors"),
            }
            for name, samples in groups.items()
        },
    }


def _wrong(soaked: Soaked, folder: Path) -> list[str]:
    """Return what is not as an undisturbed run has it."""
    if soaked.ended is None:
        return ["the run did not end, and was ended"]
    found = [f"these outlived their launcher: {', '.join(soaked.ended.left)}"] * bool(
        soaked.ended.left
    )
    if soaked.ended.code:
        return [*found, f"the run ended with {soaked.ended.code}: {soaked.ended.said}"]
    run = folder / "run"
    tables = {
        path.stem: path.with_name(f"{path.name}.ledger.jsonl") for path in folder.glob("*.csv")
    }
    notes = notes_of(folder / "notes")
    found += ledger_faults(run, tables, notes, once=False, budget=None)
    # Nothing of it need outlive a crash, and so many files are synced that the disk is all it does.
    setattr(os, "fsync", lambda _handle: None)  # noqa: B010
    whole = undisturbed(folder / "fed.toml", folder / "whole").metrics
    metrics = json.loads((run / "metrics.json").read_text())
    found += [
        f"{name} is {metrics[name]}, undisturbed {whole[name]}"
        for name in _FIGURES
        if metrics[name] != whole[name]
    ]
    return found


def _grew(figures: Mapping[str, Any]) -> list[str]:
    an_hour = figures["epochs_an_hour"] / 1024
    kept = {name: {"memory_mib": kib * an_hour} for name, kib in _KEPT_KIB.items()}
    return [
        f"{figure} of {name}: {slope['an_hour']:.3f} an hour ({slope['low']:.3f} to "
        f"{slope['high']:.3f})"
        for name, slopes in figures["slopes"].items()
        for figure, slope in slopes.items()
        if slope is not None and slope["low"] > kept[name].get(figure, 0.0)
    ]


def _plot(soaked: Soaked, path: Path) -> None:
    """Draw memory, descriptors, sessions and times to notice, one below the other."""
    minutes: dict[float, list[Sample]] = defaultdict(list)
    for one in soaked.samples:
        minutes[one.at / 60].append(one)
    times = sorted(minutes)
    figure = Figure(figsize=(SIZE[0], 5 * SIZE[1]), layout="constrained")
    panels = iter(figure.subplots(5))

    axes = title_axes(next(panels), "memory of all parties together", "minutes", "MiB (Pss)")
    axes.plot(times, [sum(one.pss for one in minutes[at]) for at in times], color=BLUE)
    axes.set_ylim(bottom=0)

    axes = title_axes(
        next(panels), "the primary's own memory, and a secondary's mean", "minutes", "MiB"
    )
    for primary, colour, label in ((True, ORANGE, "primary"), (False, BLUE, "secondary")):
        means = []
        for at in times:
            own = [one.own for one in minutes[at] if (one.party == PRIMARY) == primary]
            means.append(float(np.mean(own)) if own else math.nan)
        axes.plot(times, means, color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)

    axes = title_axes(
        next(panels), "open descriptors of all parties together", "minutes", "descriptors"
    )
    axes.plot(times, [sum(one.descriptors for one in minutes[at]) for at in times], color=BLUE)
    axes.set_ylim(bottom=0)

    axes = title_axes(next(panels), "sessions and epochs", "minutes", "sessions")
    lost = [at / 60 for at, _ in soaked.losses]
    axes.step([0.0, *lost], range(1, len(lost) + 2), where="post", color=ORANGE)
    beside = axes.twinx()
    beside.plot([at / 60 for at in soaked.epochs], range(len(soaked.epochs)), color=BLUE)
    beside.set_ylabel("epochs", fontsize=9)

    axes = title_axes(next(panels), "from a fault to when the primary notices", "seconds", "share")
    for way, colour in (("killed", ORANGE), ("cut", BLUE), ("stopped", GREY)):
        seconds = sorted(
            f.noticed_s for f in soaked.faults if f.way == way and f.noticed_s is not None
        )
        shares = [(n + 1) / len(seconds) for n in range(len(seconds))]
        axes.step(seconds, shares, where="post", color=colour, label=way)
    axes.set_xscale("log")
    axes.legend(fontsize=8, frameon=False)
    path.write_text(svg(figure))


def _said(figures: Mapping[str, Any]) -> str:
    def row(name: str, found: Mapping[str, float]) -> str:
        if not found["count"]:
            return f"  {name}: none\n"
        return (
            f"  {name}: p50 {found['p50']:.2f}, p99 {found['p99']:.2f}, most {found['most']:.2f} "
            f"({found['count']})\n"
        )

    faults = ", ".join(f"{count} {way}" for way, count in figures["faults"].items())
    text = (
        f"{figures['parties']} secondaries, {figures['epochs']} epochs, "
        f"{figures['minutes'] or math.nan:.1f} minutes, {figures['sessions']} sessions; {faults}\n"
        f"seconds from a fault to when the primary notices:\n"
    )
    text += "".join(row(name, found) for name, found in figures["noticed_s"].items())
    text += "seconds until a round is done again:\n" + row("all", figures["going_on_s"])
    text += "MiB of all parties together:\n" + row("all", figures["together_mib"])
    an_hour = figures["epochs_an_hour"]
    text += f"slopes an hour, within processes, at {an_hour:,.0f} epochs an hour:\n"
    for name, slopes in figures["slopes"].items():
        for figure, slope in slopes.items():
            text += f"  {figure} of {name}: " + (
                "too short a run to say\n"
                if slope is None
                else f"{slope['an_hour']:+.3f} ({slope['low']:+.3f} to {slope['high']:+.3f}; "
                f"{slope['processes']} processes)\n"
            )
    for fault in (*figures["wrong"], *(f"grew: {one}" for one in figures["grew"])):
        text += f"WRONG: {fault}\n"
    return text + ("" if figures["wrong"] or figures["grew"] else "all is as it should be\n")


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parties", type=int, default=4, help="secondaries; about 100 MiB each")
    parser.add_argument("--minutes", type=float, default=2.0, help="about so long")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults, about")
    parser.add_argument("--sample", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--epochs", type=int, help="default: as many as fill the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("soak"), help="of the run")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--json", action="store_true", help="figures on stdout in place of text")
    asked = parser.parse_args()
    if asked.parties < 2 or asked.minutes <= 0 or asked.every <= 0 or asked.sample <= 0:
        parser.error("--parties is 2 or more, and --minutes, --every and --sample are above 0")
    asked.folder = asked.folder.resolve()
    return asked


def main() -> int:
    """Return 1 if anything is wrong."""
    asked = _asked()
    epochs = asked.epochs or _epochs(asked)
    folder = asked.folder / "soaked"
    soaked = _soak(
        folder,
        parties=asked.parties,
        epochs=epochs,
        every_s=asked.every,
        sample_s=asked.sample,
        seed=asked.seed,
        faults_s=60 * asked.minutes,
        most_s=4 * 60 * asked.minutes + 600,
    )
    (asked.folder / "soaked.json").write_text(json.dumps(asdict(soaked)))
    if asked.plot is not None:
        _plot(soaked, asked.plot)
    figures = _figures(soaked, asked, epochs)
    figures["wrong"] = _wrong(soaked, folder)
    figures["grew"] = _grew(figures)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n" if asked.json else _said(figures))
    return 1 if figures["wrong"] or figures["grew"] else 0


if __name__ == "__main__":
    sys.exit(main())
