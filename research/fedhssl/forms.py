"""What each difference between the paper's FedHSSL and our defaults is worth.

    python research/fedhssl/forms.py run --results forms.jsonl      # goes on where it was
    python research/fedhssl/forms.py tables --results forms.jsonl

Every form is the defaults with one choice made otherwise, or with all of the paper's; everything
else, seeds and rows included, is equal, so that differences are paired by seed.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.aligned.views import scarce_rows
from research.fedhssl import methods
from research.fedhssl.fedhssl import SETS, Results, timed
from research.fedhssl.tables import with_interval

LABELS = (20, 50, 200)
HSSL = (("fedhssl", "simsiam"),)
MOMENTUM = (("fedhssl", "byol"), ("fedhssl", "moco"))
AVERAGES_NOTHING = (("fedlocalssl", "simsiam"), ("fedcssl", "simsiam"), ("fedgssl", "simsiam"))


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to run some methods and algorithms, against another one."""

    runs: tuple[tuple[str, str], ...] = HSSL
    against: str = "defaults"
    pretraining: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)


_PAPER = {"views": "apart", "queue": 4096}
FORMS: dict[str, Form] = {
    "defaults": Form(runs=(*HSSL, *MOMENTUM, *AVERAGES_NOTHING)),
    "views = apart": Form(pretraining={"views": "apart"}),
    "queue = 4096": Form(runs=(("fedhssl", "moco"),), pretraining={"queue": 4096}),
    "normalise = false": Form(runs=(("fedlocalssl", "simsiam"), *HSSL), model={"normalise": False}),
    "paper": Form(
        runs=(*HSSL, *MOMENTUM),
        pretraining=_PAPER,
        model={"normalise": False},
    ),
    "clip_norm = 1": Form(setting={"clip_norm": 1.0}),
    "clip_norm = 1, normalise = false": Form(
        against="clip_norm = 1", model={"normalise": False}, setting={"clip_norm": 1.0}
    ),
}


def run(args: argparse.Namespace) -> None:
    results = Results(args.results)
    for seed, name in itertools.product(range(args.seeds), args.set):
        load, base = SETS[name]
        data = load(None)
        prepared = methods.prepare(data, "cpu")
        pretrained: dict[str, Any] = {}
        for form in args.form:
            chosen = FORMS[form]
            setting = dataclasses.replace(
                methods.with_pretraining(base, **chosen.pretraining),
                model={**base.model, **chosen.model},
                **chosen.setting,
            )
            for method, algorithm in chosen.runs:
                cell = {"set": name, "seed": seed, "method": method, "algorithm": algorithm}
                cell |= {"aligned": 0.4, "form": form}
                if all(results.has(**cell, labelled=number) for number in LABELS):
                    continue
                # What only fine-tuning reads changes nothing of pretraining.
                key = repr((method, algorithm, setting.pretraining, setting.share))
                if key not in pretrained:
                    rows = scarce_rows(data, aligned=0.4, labelled=1, seed=seed)
                    pretrained[key] = timed(
                        methods.pretrain, prepared, setting, method, algorithm, rows, seed
                    )
                (encoders, _), seconds = pretrained[key]
                for number in LABELS:
                    rows = scarce_rows(data, aligned=0.4, labelled=number, seed=seed)
                    measured = methods.fine_tune(
                        prepared, setting, method, encoders, rows.labelled, seed
                    )
                    results.add(**cell, labelled=number, **measured, seconds=seconds)


def tables(args: argparse.Namespace) -> None:
    """Points that each form has more than what it is held against, by labels."""
    found = {
        (li["form"], li["set"], li["method"], li["algorithm"], li["labelled"], li["seed"]): li
        for li in Results(args.results).lines
    }
    print("| form | against | method | set | " + " | ".join(f"{n} labels" for n in LABELS) + " |")
    print("| --- | --- | --- | --- |" + " --- |" * len(LABELS))
    for form, chosen in FORMS.items():
        for method, algorithm in chosen.runs:
            for names in ([name] for name in args.set) if not args.mean else [args.set]:
                cells = []
                for number in LABELS:
                    gains: dict[int, list[float]] = {}
                    for name, seed in itertools.product(names, range(args.seeds)):
                        key = (name, method, algorithm, number, seed)
                        one, other = found.get((form, *key)), found.get((chosen.against, *key))
                        if one is not None and other is not None:
                            gain = 100 * (one["value"] - other["value"])
                            gains.setdefault(seed, []).append(gain)
                    cells.append(with_interval([statistics.mean(g) for g in gains.values()]))
                if form != chosen.against and any(cells):
                    where = " and ".join(names)
                    print(
                        f"| {form} | {chosen.against} | {method}, {algorithm} | {where} | "
                        + " | ".join(cells)
                        + " |"
                    )


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    for function in (run, tables):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("--results", type=Path, required=True)
        command.add_argument("--set", nargs="+", choices=list(SETS), default=["digits", "mfeat"])
        command.add_argument("--seeds", type=int, default=5)
        if function is run:
            command.add_argument("--form", nargs="+", choices=list(FORMS), default=list(FORMS))
        else:
            command.add_argument("--mean", action="store_true", help="over the sets, by seed")
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
