"""Whole simulated runs on a GPU: time, utilisation, peak memory, and SplitAvg's share of a round.

    SECUREVFL_DATA=... python research/gpu/gpu.py [--runs hdb-100 mnist-50] [--epochs N] [--batch N]
        [--noise SIGMA] [--precisions float32 bfloat16] [--json]
    python research/gpu/gpu.py --smoke
    python research/gpu/gpu.py --counts [--epochs N]

``hdb-100``: FeT on hdb, both parties' whole tables, K = 100, 100 epochs; wanted under 3 minutes on
an H100. ``mnist-50``: FeT on MNIST, 60,000 rows among 50 parties, one epoch. Time is that of the
training rounds, without linking and evaluation. SplitAvg's share is of a second, shorter run that
waits for the device around each of its steps (clip, whole units, noise, words, sum, average), so
it is not part of the time. Utilisation is what nvidia-ml-py says twice a second; without that
package it is left out. Each run has a row in float32 and one with both halves in bfloat16.
``--smoke`` goes through all of it on the CPU with tiny made-up tables.

``--counts`` needs no GPU: for each family and regime of the tests' small runs it prints what a
training round launches on the tests' stand-in for a GPU, kernels and views, and the CPU
milliseconds that the process takes for a round without a GPU, with one thread: the tenth
percentile, since the work is the same in every round.
"""

import argparse
import contextlib
import dataclasses
import json
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args
from unittest.mock import patch

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[2]))

import securevfl as sv
from research.training.speed import mnist, two_parties
from securevfl.core.devices import Precision, few_threads
from securevfl.core.memory import keep_freed_memory
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.data.tables import PartyTable
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.rounds.release import SecondaryRelease
from securevfl.lab.datasets import split_table
from securevfl.models.fet.settings import FeTConfig
from securevfl.mpc.codec import InProcessSum

ALL: Final = 10**9
"""More rows than any table has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A table, a model and how long it trains."""

    tables: Callable[[], list[PartyTable]]
    model: FeTConfig
    epochs: int
    wanted_s: float | None = None
    """Seconds of training at most, on an H100."""


def made_up(parties: int) -> list[PartyTable]:
    """Return tables without any meaning, for ``--smoke``."""
    random = np.random.default_rng(0)
    values = random.normal(size=(30, 6 * parties))
    return split_table(values, (values[:, 0] > 0).astype(np.int64), parties=parties, seed=0)


SETTINGS: Final[Mapping[str, Setting]] = {
    "hdb-100": Setting(
        tables=lambda: two_parties("hdb", ALL),
        model=FeTConfig(neighbours=100),
        epochs=100,
        wanted_s=180.0,
    ),
    "mnist-50": Setting(
        tables=lambda: mnist(60_000, parties=50),
        model=FeTConfig(neighbours=20),
        epochs=1,
    ),
}

_TINY: Final = FeTConfig(neighbours=4, hidden=8, heads=2, fourier_features=8, fourier_width=8)
SMOKE: Final[Mapping[str, Setting]] = {
    "hdb-100": Setting(tables=lambda: made_up(2), model=_TINY, epochs=2),
    "mnist-50": Setting(tables=lambda: made_up(4), model=_TINY, epochs=1),
}


class _Enough(Exception):
    """Ends a simulation from within."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """How everything is run."""

    device: str
    batch: int
    noise: float
    """Noise multiplier; 0: none."""
    precision: Precision
    """``training.precision``."""
    share_rounds: int
    """Rounds of the run that SplitAvg's share is taken of; the first two are not counted."""

    def wait(self) -> None:
        """Wait until the device has done all that it was told."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def simulate(
        self,
        setting: Setting,
        tables: list[PartyTable],
        *,
        epochs: int,
        observe: Callable[[RoundDone], None],
    ) -> None:
        """Train for so many epochs, or until ``observe`` has had enough of rounds."""

        def heard(event: ProgressEvent) -> None:
            if isinstance(event, RoundDone):
                observe(event)

        privacy = (
            sv.dp.Privacy(noise_multiplier=self.noise, encoder="trained")
            if self.noise
            else sv.dp.Privacy(mechanism="none")
        )
        with contextlib.suppress(_Enough):
            sv.simulate(
                tables,
                setting.model,
                privacy=privacy,
                training=sv.TrainingSettings(
                    epochs=epochs,
                    batch_size=self.batch,
                    patience=epochs + 1,
                    precision=self.precision,
                ),
                base="none",
                with_alone=False,
                device=self.device,
                observe=heard,
            )

    def training(self, setting: Setting, tables: list[PartyTable], epochs: int) -> dict[str, Any]:
        """Return time, utilisation and memory of whole epochs."""
        begun: list[float] = []
        rounds = 0
        ended = 0.0

        def observe(event: RoundDone) -> None:
            nonlocal rounds, ended
            if not begun:
                # The first round pays for what is made once; all others are timed.
                self.wait()
                begun.append(time.monotonic())
            elif event.done == event.of and event.epoch == epochs:
                self.wait()
                ended = time.monotonic()
            rounds += 1

        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with utilisation(self.device) as busy:
            self.simulate(setting, tables, epochs=epochs, observe=observe)
        seconds = (ended - begun[0]) * rounds / (rounds - 1)
        memory = torch.cuda.max_memory_allocated() / 1e9 if self.device == "cuda" else None
        return {
            "epochs": epochs,
            "rounds": rounds,
            "seconds": round(seconds, 2),
            "ms_a_round": round(1000 * seconds / rounds, 2),
            "wanted_s": setting.wanted_s,
            "utilisation": round(float(np.mean(busy)), 1) if busy else None,
            "peak_gb": None if memory is None else round(memory, 2),
        }

    def share(self, setting: Setting, tables: list[PartyTable]) -> float:
        """Return which part of a round's time SplitAvg takes, the secondaries one by one."""
        spent = 0.0
        seen = 0
        begun = ended = 0.0

        def timed(whole: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal spent
                self.wait()
                start = time.perf_counter()
                found = whole(*args, **kwargs)
                self.wait()
                spent += time.perf_counter() - start
                return found

            return call

        release = timed(SecondaryRelease.release)

        def without_model(own: SecondaryRelease, plan: Any, represent: Any, **more: Any) -> Any:
            def left_out(due: Any) -> Any:
                nonlocal spent
                self.wait()
                start = time.perf_counter()
                found = represent(due)
                self.wait()
                spent -= time.perf_counter() - start
                return found

            return release(own, plan, left_out, **more)

        def observe(_: RoundDone) -> None:
            nonlocal seen, spent, begun, ended
            seen += 1
            if seen == 2:
                self.wait()
                spent, begun = 0.0, time.perf_counter()
            elif seen == self.share_rounds:
                self.wait()
                ended = time.perf_counter()
                raise _Enough

        with (
            patch.object(SecondaryRelease, "release", without_model),
            patch.object(InProcessSum, "__call__", timed(InProcessSum.__call__)),
            patch.object(CutLayer, "decode", timed(CutLayer.decode)),
        ):
            self.simulate(setting, tables, epochs=self.share_rounds, observe=observe)
        return spent / (ended - begun)


@contextlib.contextmanager
def utilisation(device: str) -> Iterator[list[int]]:
    """Fill a list with the GPU's utilisation in percent, twice a second; empty if nobody knows."""
    found: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            try:
                found.append(torch.cuda.utilization())
            except (ImportError, RuntimeError):
                return

    watching = threading.Thread(target=watch, daemon=True)
    if device == "cuda":
        watching.start()
    try:
        yield found
    finally:
        done.set()
        if device == "cuda":
            watching.join()


def print_counts(epochs: int) -> None:
    """Print a table of device operations and CPU milliseconds a round.

    Args:
        epochs: Epochs whose rounds are timed, but for the first round of each.
    """
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from helpers.labelled_runs import ROUNDS, between_rounds, operations_a_round, write

    print("| run | device operations | CPU ms |", "| --- | --- | --- |", sep="\n")
    for name, sections in ROUNDS.items():
        training = {**sections.get("training", {}), "epochs": epochs, "patience": epochs}
        with tempfile.TemporaryDirectory() as folder:
            counted, timed = Path(folder) / "counted", Path(folder) / "timed"
            for path in (counted, timed):
                path.mkdir()
            count = operations_a_round(write(counted, sections), counted / "run")
            path = write(timed, {**sections, "training": training})
            with few_threads(1):
                seconds = between_rounds(path, timed / "run", device="cpu", read=time.process_time)
        print(f"| {name} | {count:,g} | {1000 * np.quantile(seconds, 0.1):.1f} |", flush=True)


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--epochs", type=int, help="of every run")
    parser.add_argument("--batch", type=int, default=128, help="rows of a round")
    parser.add_argument("--noise", type=float, default=0.0, help="noise multiplier; 0: no noise")
    known = get_args(Precision)
    parser.add_argument("--precisions", nargs="+", choices=known, default=known)
    parser.add_argument("--smoke", action="store_true", help="tiny tables, on the CPU")
    parser.add_argument("--counts", action="store_true", help="launches and CPU time, without GPU")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.counts:
        print_counts(options.epochs or 30)
        return
    if not options.smoke and not torch.cuda.is_available():
        print("gpu.py: torch finds no GPU; --smoke tries the script on the CPU", file=sys.stderr)
        sys.exit(2)
    keep_freed_memory()
    machine = platform.machine() if options.smoke else torch.cuda.get_device_name()
    batch = 8 if options.smoke else options.batch
    rows: list[dict[str, Any]] = []
    for name in options.runs:
        setting = (SMOKE if options.smoke else SETTINGS)[name]
        tables = setting.tables()
        for precision in options.precisions:
            bench = Bench(
                device="cpu" if options.smoke else "cuda",
                batch=batch,
                noise=options.noise,
                precision=precision,
                share_rounds=4 if options.smoke else 20,
            )
            figures = bench.training(setting, tables, options.epochs or setting.epochs)
            share = round(bench.share(setting, tables), 3)
            rows.append({"run": name, "precision": precision, **figures, "splitavg_share": share})
    if options.json:
        about = {"device": machine, "torch": torch.__version__, "batch": batch}
        print(json.dumps({**about, "rows": rows}))
        return
    print(f"{machine}, torch {torch.__version__}, batches of {batch}")
    print(f"| {' | '.join(rows[0])} |", "| --- " * len(rows[0]) + "|", sep="\n")
    for row in rows:
        cells = (f"{one:g}" if isinstance(one, int | float) else one or "" for one in row.values())
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
