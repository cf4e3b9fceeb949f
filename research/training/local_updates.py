"""Local updates in training, tried outside the package: Q steps of both halves a round.

    SECUREVFL_DATA=... python research/training/local_updates.py [SET ...] [--seeds 3] [--epochs 5]
        [--rate 0.003] [--local 1 2 4] [--epsilon 8]

FedBCD's form (Liu et al. 2022): of one exchanged average and one exchanged gradient the top model
and every bottom model take Q optimizer steps, each on its own rows computed anew. With an epsilon
(encoder dp-trained) each step of a bottom model is an update of its own with fresh noise, sqrt(Q)
times as much: Q such updates cost what one did, so that all Q have the same epsilon, rounds and
releases. ``--top-only`` takes the further steps at the primary
alone, where they cost nothing. Runs are those of research/leaks/leaks.py: FeT, no base. Prints the
test figure, mean and deviation over seeds.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.leaks.leaks import source_of, tables_of
from securevfl.config.reading import parse_federation
from securevfl.core.devices import to_device
from securevfl.federation.rounds.network_primary import NetworkPrimary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.rounds.updates import GradientNoise, set_gradients
from securevfl.runtime import simulation
from securevfl.runtime.run_options import RunOptions

NAMES = ("digits", "mfeat6", "hdb")


@contextmanager
def local_updates(steps: int, *, top_only: bool) -> Iterator[None]:
    """Let both halves of simulations take so many steps a round, or the primary's half alone."""
    learn = Secondary.learn
    train_epoch, make_noise = NetworkPrimary._train_epoch, GradientNoise.__init__

    def learn_on(self: Any, plan: Any, gradient: Any) -> None:
        learn(self, plan, gradient)
        term = to_device(gradient, self.device) / len(plan.active)
        for _ in range(0 if top_only else steps - 1):
            aggregation = self.contribution.aggregation
            with torch.enable_grad():
                finite, _lost = aggregation.finite(self.represent(plan))
                clipped = aggregation.clip(finite)
            step = self._backward_step(plan, clipped)
            step.gradients_from(term, zero_lost=self.contribution.promised)
            self.optimizer.step(epoch=self.validator.epoch)

    def make_more_noise(self: Any, *, noise_std: float, **more: Any) -> None:
        make_noise(self, noise_std=noise_std * (1 if top_only else steps**0.5), **more)

    def train(self: Any, epoch: int) -> Any:
        asked = self.exchange.release
        average: list[Any] = []
        returned = self.exchange.return_gradient

        def note_average(plan: Any) -> Any:
            average[:] = [plan, asked(plan)]
            return average[1]

        def step_on(plan: Any, gradient: Any) -> None:
            returned(plan, gradient)
            leaf, targets = average[1].detach(), self.targets_of(plan.rows)
            # The caller's own step, from the gradients that it has set, is the last of Q.
            with torch.enable_grad():
                for _ in range(steps - 1):
                    self.optimizer.step(epoch=epoch)
                    loss = self.head.loss(self._forward(plan, leaf), targets)
                    set_gradients(loss, self.optimizer.parameters)

        with (
            mock.patch.object(self.exchange, "release", note_average),
            mock.patch.object(self.exchange, "return_gradient", step_on),
        ):
            return train_epoch(self, epoch)

    with (
        mock.patch.object(Secondary, "learn", learn_on),
        mock.patch.object(GradientNoise, "__init__", make_more_noise),
        mock.patch.object(NetworkPrimary, "_train_epoch", train),
    ):
        yield


def test_run(
    name: str,
    steps: int,
    *,
    epochs: int,
    rate: float,
    epsilon: str | None,
    top_only: bool,
    seed: int,
) -> tuple[float, float]:
    """Return the test figure and epsilon of one run."""
    tables = tables_of(name)
    source = source_of(name, f"trained-{epsilon}" if epsilon else "averaged", tables, seed=seed)
    source["training"] |= {"epochs": epochs, "learning_rate": rate}
    config = parse_federation(source, file="local_updates")
    parties = {table.name: table for table in tables.parties}
    with tempfile.TemporaryDirectory() as folder, local_updates(steps, top_only=top_only):
        options = RunOptions(run_folder=Path(folder))
        result = simulation.simulate_federation(config, parties, options, with_alone=False)
    return result.metrics["test"], result.metrics["privacy"]["epsilon"]


def main() -> None:
    """Print a line for each set and Q."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sets", nargs="*", help=f"default: {', '.join(NAMES)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=3e-3, help="of every optimizer")
    parser.add_argument("--local", type=int, nargs="+", default=[1, 2, 4], metavar="Q")
    parser.add_argument("--epsilon", help="default: no noise")
    parser.add_argument("--top-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    given = {name: getattr(options, name) for name in ("epochs", "rate", "epsilon", "top_only")}
    for name in options.sets or NAMES:
        for steps in options.local:
            start = time.process_time()
            runs = [test_run(name, steps, seed=seed, **given) for seed in range(options.seeds)]
            figures, epsilon = [figure for figure, _ in runs], runs[0][1]
            spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
            each = " ".join(f"{figure:.4g}" for figure in figures)
            seconds = (time.process_time() - start) / len(figures)
            halves = "top" if options.top_only else "both"
            print(
                f"{name} epochs {options.epochs} rate {options.rate:g} Q {steps} {halves} "
                f"epsilon {epsilon}: {statistics.mean(figures):.4g} ± {spread:.2g} ({each}), "
                f"{seconds:.0f} CPU s a run",
                flush=True,
            )


if __name__ == "__main__":
    main()
