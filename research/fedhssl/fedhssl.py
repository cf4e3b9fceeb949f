"""How many labels and aligned rows make self-supervised pretraining worth it.

    python research/fedhssl/fedhssl.py run --results results.jsonl      # goes on where it was
    python research/fedhssl/fedhssl.py updates --results results.jsonl  # several an exchange
    python research/fedhssl/fedhssl.py guidance --results guidance.jsonl  # Table V, and figure 8
    python research/fedhssl/fedhssl.py samples --results samples.jsonl    # Table IX
    python research/fedhssl/fedhssl.py tables --results results.jsonl
    python research/fedhssl/fedhssl.py plot --results results.jsonl --out fedhssl.svg
    python research/fedhssl/fedhssl.py speed
    python research/fedhssl/fedhssl.py run --set nuswide --folder NUS_WIDE --results nuswide.jsonl

Every seed draws which training rows are aligned and labelled, and all weights; test rows are the
same for all, and are read once at the end of fine-tuning. Every method fine-tunes for the same
number of steps at the same rate: no epoch and no rate is chosen by test rows.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.aligned.avazu import load_avazu
from research.common.aligned.halves import digits_halves, folder_views, mfeat_views, mnist_halves
from research.common.aligned.nuswide import load_nuswide
from research.common.aligned.views import AlignedViews, ScarceRows, scarce_rows
from research.fedhssl import methods
from research.fedhssl.tables import (
    plot,
    plot_guidance,
    print_gains,
    print_guidance,
    print_measures,
    print_samples,
    print_tables,
)

# Chosen on rows that no table below tests on: see research/fedhssl/README.md.
SMALL = methods.Setting(
    model={"encoder_hidden": 128, "hidden": 128},
    pretraining={
        "iterations": 10,
        "batch_size": 256,
        "learning_rate": 3e-3,
        "projector": (128, 128, 128),
        "predictor": 32,
    },
    learning_rate=1e-3,
    steps=100,
    epochs=10,
)

# [FedHSSL] Tables III and VIII, appendix B-A.
_PAPER = {"iterations": 10, "batch_size": 512, "optimizer": "sgd", "learning_rate": 0.05}
NUSWIDE = methods.Setting(model={}, pretraining=_PAPER, batch_size=512)
AVAZU = methods.Setting(
    model={"encoder": "embedding"}, pretraining={**_PAPER, "iterations": 40}, batch_size=512
)

LABELS = (20, 50, 200, 500, 1000)
PAPER_LABELS = (200, 400, 600, 800, 1000)

TABLES = {
    "methods": print_tables,
    "gains": print_gains,
    "measures": print_measures,
    "guidance": print_guidance,
    "samples": print_samples,
}
PLOTS = {"methods": plot, "guidance": plot_guidance}

Load = Callable[[Path | None], AlignedViews]
SETS: dict[str, tuple[Load, methods.Setting]] = {
    "mfeat": (lambda _: mfeat_views(2).standardised(), SMALL),
    "mfeat3": (lambda _: mfeat_views(3).standardised(), SMALL),
    "digits": (lambda _: digits_halves(2).standardised(), SMALL),
    "digits3": (lambda _: digits_halves(3).standardised(), SMALL),
    "mnist": (lambda _: mnist_halves(2, rows=4000), SMALL),
    "mnist20k": (lambda _: mnist_halves(2, rows=20_000), SMALL),
    "fate_vehicle": (lambda _: folder_views("fate_vehicle").standardised(), SMALL),
    "fate_breast": (lambda _: folder_views("fate_breast").standardised(), SMALL),
    "nuswide": (lambda folder: load_nuswide(_given(folder)), NUSWIDE),
    "avazu": (lambda folder: load_avazu(_given(folder)), AVAZU),
}
PAPER_SETS = ("nuswide", "avazu")
ALGORITHMS = ("simsiam", "byol", "moco")


def _given(folder: Path | None) -> Path:
    if folder is None:
        raise SystemExit("name the set's folder (or Avazu's file) with --folder")
    return folder


class Results:
    """Lines of a file, one a measurement; what is there is not measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]
        self._done = {self._key(line) for line in self.lines}

    @staticmethod
    def _key(line: dict[str, Any]) -> tuple[Any, ...]:
        names = (
            "set", "aligned", "method", "algorithm", "seed", "labelled", "updates", "rounds",
            "form", "places", "lambda_p", "lambda_f", "gamma", "samples",
        )  # fmt: skip
        return tuple(line.get(name) for name in names)

    def has(self, **cell: Any) -> bool:
        """Whether the cell was measured."""
        return self._key(cell) in self._done

    def add(self, **line: Any) -> None:
        """Write a measurement down."""
        if self._key(line) in self._done:
            return
        self._done.add(self._key(line))
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def counts(data: AlignedViews, aligned: float, labels: tuple[int, ...]) -> list[int]:
    return [number for number in labels if number <= round(aligned * len(data.train))]


def run(args: argparse.Namespace) -> None:
    results = Results(args.results)
    for seed, name in itertools.product(range(args.first_seed, args.seeds), args.set):
        load, setting = SETS[name]
        data = load(args.folder)
        prepared = methods.prepare(data, args.device)
        labels = args.labelled or (PAPER_LABELS if name in PAPER_SETS else LABELS)
        most = max(args.aligned)
        cell = {"set": name, "seed": seed}
        # Boosting, FedSplitNN and local learning know of no alignment beyond the labelled rows.
        if "boosting" in args.method:
            plain(results, prepared, setting, "boosting", cell, most, labels)
        for method in ("fedsplitnn", "untrained"):
            if method in args.method:
                plain(results, prepared, setting, method, cell, most, labels)
        for algorithm in args.algorithm:
            own = {**cell, "algorithm": algorithm}
            if "fedlocalssl" in args.method:
                pretrained(results, prepared, setting, "fedlocalssl", own, most, labels)
            for share, method in itertools.product(args.aligned, ("fedgssl", "fedhssl")):
                if method in args.method:
                    own["aligned"] = share
                    pretrained(results, prepared, setting, method, own, share, labels)


def plain(
    results: Results,
    prepared: methods.Prepared,
    setting: methods.Setting,
    method: str,
    cell: dict[str, Any],
    aligned: float,
    labels: tuple[int, ...],
) -> None:
    """Measure a method that does not pretrain for each number of labels."""
    data = prepared.data
    for number in counts(data, aligned, labels):
        own = {**cell, "method": method, "labelled": number}
        if not results.has(**own):
            rows = scarce_rows(data, aligned=aligned, labelled=number, seed=cell["seed"])
            measured, seconds = timed(
                methods.supervised, prepared, setting, method, rows, cell["seed"]
            )
            results.add(**own, metric=data.metric, **measured, seconds=seconds)


def pretrained(
    results: Results,
    prepared: methods.Prepared,
    setting: methods.Setting,
    method: str,
    cell: dict[str, Any],
    aligned: float,
    labels: tuple[int, ...],
) -> None:
    """Pretrain once, and fine-tune for each number of labels.

    FedCSSL is the cross-party half of FedGSSL, whose pretraining never reads the other half: one
    pretraining serves both.
    """
    data, seed = prepared.data, cell["seed"]
    tuned = ("fedcssl", "fedgssl") if method == "fedgssl" else (method,)
    numbers = counts(data, aligned, labels)
    if all(results.has(**cell, method=m, labelled=n) for m in tuned for n in numbers):
        return
    rows = scarce_rows(data, aligned=aligned, labelled=1, seed=seed)
    (encoders, history), seconds = timed(
        methods.pretrain, prepared, setting, method, cell["algorithm"], rows, seed
    )
    spreads = {key: history[-1][key] for key in history[-1] if key.endswith("spread")}
    for name, number in itertools.product(tuned, numbers):
        labelled = scarce_rows(data, aligned=aligned, labelled=number, seed=seed).labelled
        measured = methods.fine_tune(prepared, setting, name, encoders, labelled, seed)
        line = {"metric": data.metric, **measured, "seconds": seconds, **spreads}
        results.add(**cell, method=name, labelled=number, **line)


def updates(args: argparse.Namespace) -> None:
    """[FedHSSL] figure 7: several updates from one exchange, by rounds."""
    results = Results(args.results)
    for name, seed, number, iterations in itertools.product(
        args.set, range(args.seeds), (1, 4, 8), (2, 5, 10)
    ):
        load, base = SETS[name]
        data = load(args.folder)
        prepared = methods.prepare(data, args.device)
        setting = methods.with_pretraining(base, local_updates=number, iterations=iterations)
        rows = scarce_rows(data, aligned=0.2, labelled=args.labelled, seed=seed)
        cell = {
            "set": name, "aligned": 0.2, "method": "fedhssl", "algorithm": "simsiam", "seed": seed,
            "labelled": args.labelled, "updates": number, "rounds": iterations,
        }  # fmt: skip
        if results.has(**cell):
            continue
        (encoders, history), seconds = timed(
            methods.pretrain, prepared, setting, "fedhssl", "simsiam", rows, seed
        )
        measured = methods.fine_tune(prepared, setting, "fedhssl", encoders, rows.labelled, seed)
        sent = methods.traffic(setting, history, len(rows.aligned))
        results.add(**cell, metric=data.metric, **measured, seconds=seconds, **sent)


def guidance(args: argparse.Namespace) -> None:
    """[FedHSSL] Table V and figure 8: local encoders alone, by gamma, with and without the mean.

    At gamma 0 the cross-party encoder guides nothing: FedGSSL's local encoder is FedLocalSSL's.
    """
    results = Results(args.results)
    cells = itertools.product(
        range(args.seeds), args.set, args.algorithm, args.gamma, ("fedgssl", "fedhssl")
    )
    for seed, name, algorithm, gamma, method in cells:
        cell = {
            "set": name, "aligned": 0.2, "method": method, "algorithm": algorithm, "seed": seed,
            "labelled": args.labelled, "gamma": gamma,
        }  # fmt: skip
        if not results.has(**cell):
            setting = methods.with_pretraining(SETS[name][1], guidance=gamma)
            setting = dataclasses.replace(setting, model={**setting.model, "encoders": "local"})
            prepared = _prepared(name, args)
            rows = scarce_rows(prepared.data, aligned=0.2, labelled=args.labelled, seed=seed)
            _measure(results, prepared, setting, rows, cell)


def samples(args: argparse.Namespace) -> None:
    """[FedHSSL] Table IX: cross-party and local learning from shares of the training rows."""
    results = Results(args.results)
    cells = itertools.product(
        range(args.seeds), args.set, args.algorithm, (0.2, 0.4, 1.0), ("fedlocalssl", "fedcssl")
    )
    for seed, name, algorithm, share, method in cells:
        cell = {
            "set": name, "method": method, "algorithm": algorithm, "seed": seed,
            "labelled": args.labelled, "samples": share,
        }  # fmt: skip
        if not results.has(**cell):
            prepared = _prepared(name, args)
            # The labelled rows are the same for every share.
            few = scarce_rows(prepared.data, aligned=0.2, labelled=args.labelled, seed=seed)
            some = scarce_rows(prepared.data, aligned=share, labelled=1, seed=seed).aligned
            rows = dataclasses.replace(few, local=some, aligned=some)
            _measure(results, prepared, SETS[name][1], rows, cell)


@functools.cache
def _loaded(name: str, folder: Path | None, device: str) -> methods.Prepared:
    return methods.prepare(SETS[name][0](folder), device)


def _prepared(name: str, args: argparse.Namespace) -> methods.Prepared:
    return _loaded(name, args.folder, args.device)


def _measure(
    results: Results,
    prepared: methods.Prepared,
    setting: methods.Setting,
    rows: ScarceRows,
    cell: dict[str, Any],
) -> None:
    """Pretrain and fine-tune once."""
    method, seed = cell["method"], cell["seed"]
    (encoders, _), seconds = timed(
        methods.pretrain, prepared, setting, method, cell["algorithm"], rows, seed
    )
    measured = methods.fine_tune(prepared, setting, method, encoders, rows.labelled, seed)
    results.add(**cell, metric=prepared.data.metric, **measured, seconds=seconds)


def speed(args: argparse.Namespace) -> None:
    """CPU seconds of ten iterations on mfeat with the paper's networks, 40 % aligned."""
    data = mfeat_views(2).standardised()
    prepared = methods.prepare(data, args.device)
    rows = scarce_rows(data, aligned=0.4, labelled=1, seed=0)
    for algorithm in ALGORITHMS:
        setting = methods.Setting(model={}, pretraining={"iterations": 10, "batch_size": 512})
        taken = [
            timed(methods.pretrain, prepared, setting, "fedhssl", algorithm, rows, seed)[1]
            for seed in range(3)
        ]
        # Each party sees every training row in local learning, and the aligned ones once more.
        samples = 10 * 2 * (len(rows.local) + len(rows.aligned))
        print(
            f"{algorithm}: {statistics.median(taken):.1f} CPU-seconds (of 3: "
            f"{min(taken):.1f} to {max(taken):.1f}), "
            f"{samples / statistics.median(taken):.0f} rows a CPU-second"
        )


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    began = time.process_time()
    result = function(*arguments)
    return result, round(time.process_time() - began, 2)


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    commands = parser.add_subparsers(required=True)
    for function, name in (
        (run, "run"), (updates, "updates"), (guidance, "guidance"), (samples, "samples"),
        (tables, "tables"), (draw, "plot"), (speed, "speed"),
    ):  # fmt: skip
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--device", default="cpu")
        if name != "speed":
            many = "+" if name in ("tables", "plot") else None
            command.add_argument("--results", type=Path, required=True, nargs=many)
        yield command


def tables(args: argparse.Namespace) -> None:
    TABLES[args.of](read(args))


def draw(args: argparse.Namespace) -> None:
    PLOTS[args.of](read(args), args.out)


def read(args: argparse.Namespace) -> list[dict[str, Any]]:
    lines = [line for path in args.results for line in Results(path).lines]
    return [
        line
        for line in lines
        if (not args.labelled or line["labelled"] in args.labelled)
        and (not args.algorithm or line.get("algorithm") in (None, *args.algorithm))
    ]


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    running, updating, guiding, sampling, showing, drawing, _ = options(parser)
    for command in (running, updating, guiding, sampling):
        command.add_argument("--set", nargs="+", choices=list(SETS), default=["mfeat", "digits"])
        command.add_argument("--seeds", type=int, default=5)
        command.add_argument("--folder", type=Path)
    running.add_argument("--first-seed", type=int, default=0)
    running.add_argument("--labelled", nargs="+", type=int)
    running.add_argument("--aligned", nargs="+", type=float, default=[0.2, 0.4])
    for command in (running, guiding):
        command.add_argument("--algorithm", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    sampling.add_argument("--algorithm", nargs="+", choices=ALGORITHMS, default=["simsiam"])
    guiding.add_argument(
        "--gamma", nargs="+", type=float, default=[0.0, 0.5], help="weights of the guidance"
    )
    for command in (guiding, sampling):
        command.add_argument("--labelled", type=int, default=200)
    running.add_argument(
        "--method",
        nargs="+",
        default=[*methods.SUPERVISED, "fedlocalssl", "fedgssl", "fedhssl"],
        help="fedgssl measures fedcssl as well; untrained is fedhssl's network without pretraining",
    )
    updating.add_argument("--labelled", type=int, default=50)
    for command in (showing, drawing):
        command.add_argument("--labelled", nargs="+", type=int, help="leave other numbers out")
        command.add_argument("--algorithm", nargs="+", choices=ALGORITHMS, help="and other ones")
    showing.add_argument("--of", choices=tuple(TABLES), default="methods")
    drawing.add_argument("--of", choices=tuple(PLOTS), default="methods")
    drawing.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
