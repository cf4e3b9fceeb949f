"""What the step size and its schedule are worth: validation and test metric, by seed.

    SECUREVFL_DATA=... python research/results/step_sizes.py [SET ...] [--families fet,fedsim]
        [--steps 0.001,0.003,0.003:cosine] [--seeds 2] [--first-seed 100] [--epochs 20]
        [--epsilon E] [--model 'party_dropout = 0.5']

Everything else is as it comes, but for K = 10 and no base, so that the joint model shows by itself.
``--model`` changes the families' own settings, as TOML. With ``--epsilon`` encoders are dp-trained,
20 links a record. ``digits`` and ``diabetes`` need no ``SECUREVFL_DATA``.
"""

import argparse
import statistics
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

sys.path.append(str(Path(__file__).parents[2]))

import securevfl as sv
from research.common.linked_tables import Tables, places
from research.results.beside_alone import dealt
from securevfl.core.memory import keep_freed_memory
from securevfl.core.settings import read_settings
from securevfl.dp.privacy import Privacy
from securevfl.models.registry import family_named

NEIGHBOURS: Final = 10
DIGITS_BOUNDS: Final = (0.0, 16.0)
SETS: Final[dict[str, Callable[[], Tables]]] = {
    "digits": lambda: dealt("digits", 5, NEIGHBOURS, None)(rows=None),
    "diabetes": lambda: dealt("diabetes", 3, NEIGHBOURS, None)(rows=None),
    "house_kc": lambda: places("house_kc", rows=2000, key_noise=0.0),
    "letter": lambda: dealt("letter", 3, NEIGHBOURS, 3000)(rows=None),
    "mnist": lambda: dealt("mnist", 10, NEIGHBOURS, 2000)(rows=None),
}


def one_run(tables: Tables, family: str, step: str, seed: int, options: argparse.Namespace) -> Any:
    """Return the best validation metric, the test metric and the epochs of a run."""
    rate, _, schedule = step.partition(":")
    training = {"learning_rate": float(rate), "schedule": schedule or "constant"}
    own = tomllib.loads(options.model)
    model = family_named(family).settings_from({"neighbours": NEIGHBOURS, **own})
    privacy, bounds = Privacy(mechanism="none"), None
    if options.epsilon:
        privacy = Privacy(epsilon=options.epsilon, encoder="dp-trained", links_per_record=20)
        bounds = DIGITS_BOUNDS
    run = sv.simulate(
        tables.parties,
        model,
        task=tables.task,
        privacy=privacy,
        bounds=bounds,
        training=read_settings(
            sv.TrainingSettings, {**training, "epochs": options.epochs}, where="training"
        ),
        base="none",
        with_alone=False,
        seed=seed,
    )
    return run.metrics["validation"], run.metrics["test"], len(run.history)


def cell(numbers: list[float]) -> str:
    """Return mean and deviation over seeds."""
    spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return f"{statistics.mean(numbers):.4g} ± {spread:.2g}"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", default=list(SETS), metavar="SET", help=", ".join(SETS))
    parser.add_argument("--families", default="fet,fedsim")
    parser.add_argument(
        "--steps", default="0.001,0.003,0.003:cosine", help="rates, each with a schedule if any"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--epsilon", type=float, help="of dp-trained encoders; digits alone")
    parser.add_argument("--model", default="", help="settings of [model], as TOML")
    options = parser.parse_args()
    if unknown := set(options.sets) - set(SETS):
        parser.error(f"no such set: {', '.join(sorted(unknown))}; there are {', '.join(SETS)}")
    if options.epsilon and options.sets != ["digits"]:
        parser.error("--epsilon is for digits alone, whose features have bounds")
    torch.set_num_threads(1)
    keep_freed_memory()  # as every command does
    print("| set | family | step size | validation | test | epochs |", "| --- " * 6 + "|", sep="\n")
    for name in options.sets:
        tables = SETS[name]()
        for family in options.families.split(","):
            for step in options.steps.split(","):
                seeds = range(options.first_seed, options.first_seed + options.seeds)
                runs = [one_run(tables, family, step, seed, options) for seed in seeds]
                validation, test, epochs = (list(column) for column in zip(*runs, strict=True))
                figures = f"{cell(validation)} | {cell(test)} | {', '.join(map(str, epochs))}"
                print(f"| {name} | {family} | {step} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
