"""What each partner of the digits federation is worth, without noise and at epsilon 8.

    python research/contribution/partners.py --out runs/partners

Five parties as in ``securevfl demo``, each with about a fifth of the pixels, linked by fuzzy keys;
frozen encoders in blocks. Simulates both runs, measures what partners are worth, and prints a table
in Markdown; ``--seed`` draws another split. The run folders keep ``contribution.json`` and the
report.
"""

import argparse
import copy
import time
from pathlib import Path

import securevfl as sv
from securevfl.config.reading import parse_federation
from securevfl.desk.report.page import write_report
from securevfl.lab.datasets import demo_federation, digits_tables, write_tables
from securevfl.runtime.coalitions import Estimate

_NUMBERS = {"none": 6, "24": 3, "8": 2}
"""Numbers a secondary: with noise few that are seen, without it as many as say something."""


def main() -> None:
    """Simulate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the run")
    parser.add_argument("--out", type=Path, default=Path("runs/partners"), help="run folders")
    asked = parser.parse_args()
    write_tables(digits_tables(seed=asked.seed), asked.out / "tables")
    head = "leaves and the rest trains again"
    print(f"| epsilon | secondary | gone tomorrow | {head} | Shapley |")
    print("| --- | --- | --- | --- | --- |")
    for epsilon in _NUMBERS:
        begin = time.monotonic()
        found = _measured(epsilon, asked.seed, asked.out)
        assert found.again is not None, "everything lies at the primary"
        metric, gain = found.metric, found.gone.gain[found.metric]
        for name, gone in found.gone.partners.items():
            again = found.again.partners[name]
            cells = (gone.leave_one_out, again.leave_one_out, again.shapley)
            print(
                f"| {epsilon} | {name} | " + " | ".join(_cell(one[metric]) for one in cells) + " |"
            )
        both = f"{found.gone.all[metric].value:.3f}, alone {found.gone.none[metric].value:.3f}"
        seconds = time.monotonic() - begin
        print(f"| {epsilon} | all: {metric} {both} | | | {_cell(gain)} |", flush=True)
        print(f"epsilon {epsilon}: {seconds:.0f} s", flush=True)


def _measured(epsilon: str, seed: int, out: Path) -> sv.Contribution:
    promise = {"encoder": "frozen", "links_per_record": 1}
    noise: dict[str, object] = {"mechanism": "none"}
    if epsilon != "none":
        noise = {"mechanism": "gaussian", "epsilon": float(epsilon), "delta": 1e-5}
    source = demo_federation(seed=seed)
    source["model"] = {
        "family": "fet",
        "neighbours": 4,
        "hidden": 4 * _NUMBERS[epsilon],
        "release": "pooled",
        "top": "additive",
    }
    source["training"] |= {"epochs": 60, "learning_rate": 1e-3, "patience": 15}
    source["privacy"] = {**promise, **noise, "unit": "secondary-record"}
    source["base"] = {"estimator": "boosting"}
    source["encoder"] = {"method": "principal", "layout": "blocks"}
    # No labels are masked, so no dealer is needed.
    source["party"].pop()
    config = parse_federation(copy.deepcopy(source), file="research/contribution/partners.py")
    folder = out / f"epsilon-{epsilon}-seed-{seed}"

    sv.simulate(config, out=folder, data_root=out, progress=False)
    found = sv.contribution(folder, data_root=out)
    write_report(folder)
    return found


def _cell(figure: Estimate) -> str:

    ends = "" if figure.interval is None else "{:+.3f} to {:+.3f}".format(*figure.interval)
    return f"{figure.value:+.3f} ({ends})"


if __name__ == "__main__":
    main()
