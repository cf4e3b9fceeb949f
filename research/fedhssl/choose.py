"""Settings of FedHSSL's pretraining, compared on training rows alone.

    python research/fedhssl/choose.py --set mnist --try iterations=10 --try iterations=40
    python research/fedhssl/choose.py --set mnist --try iterations=40,image.flip=0

A quarter of the set's training rows stands for the test rows, which are not read; seeds are others
than those of the tables. The first line is of FedSplitNN, which does not pretrain.
"""

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.aligned.views import AlignedViews, scarce_rows
from research.fedhssl import methods
from research.fedhssl.fedhssl import ALGORITHMS, SETS, timed
from securevfl.core.conventions import stream

SEEDS = (100, 101, 102)


def quarter_apart(data: AlignedViews) -> AlignedViews:
    """Return the training rows alone, a quarter of them as test rows."""
    order = stream(0, "choose", data.name).permutation(data.train)
    return dataclasses.replace(data, train=order[len(order) // 4 :], test=order[: len(order) // 4])


def changed(setting: methods.Setting, text: str) -> methods.Setting:
    """Read ``name=number`` pairs: of fine-tuning, else of pretraining."""
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        number: Any = float(value) if "." in value or "e" in value else int(value)
        if name.startswith("tune."):
            setting = dataclasses.replace(setting, **{name.removeprefix("tune."): number})
        else:
            setting = methods.with_pretraining(setting, **{name: number})
    return setting


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--set", choices=list(SETS), required=True)
    parser.add_argument("--try", action="append", default=[], dest="settings")
    parser.add_argument("--labelled", nargs="+", type=int, default=[20, 50, 200])
    parser.add_argument("--method", default="fedgssl", choices=methods.PRETRAINED)
    parser.add_argument("--algorithm", default="simsiam", choices=ALGORITHMS)
    args = parser.parse_args()
    load, base = SETS[args.set]
    prepared = methods.prepare(quarter_apart(load(None)), "cpu")
    data = prepared.data
    for method, text in [("fedsplitnn", ""), *((args.method, text) for text in args.settings)]:
        setting = changed(base, text)
        values: dict[int, list[float]] = {number: [] for number in args.labelled}
        seconds = 0.0
        for seed in SEEDS:
            encoders = None
            if method != "fedsplitnn":
                rows = scarce_rows(data, aligned=0.4, labelled=1, seed=seed)
                (encoders, _), taken = timed(
                    methods.pretrain, prepared, setting, method, args.algorithm, rows, seed
                )
                seconds += taken
            for number, found in values.items():
                rows = scarce_rows(data, aligned=0.4, labelled=number, seed=seed)
                measured = methods.fine_tune(
                    prepared, setting, method, encoders, rows.labelled, seed
                )
                found.append(measured["value"])
        means = ", ".join(f"{n} labels {statistics.mean(v):.3f}" for n, v in values.items())
        print(f"{args.set} {method} {text or 'as it is'}: {means}; {seconds:.0f} CPU-s", flush=True)


if __name__ == "__main__":
    main()
