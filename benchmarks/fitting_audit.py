"""Is a fitted autoencoder as private as promised? Real noise, one record there or not, many times.

    OMP_NUM_THREADS=1 python benchmarks/fitting_audit.py

The attacker knows both tables and sees every noised sum of ``pretrain``. It works out what each
step's sum would be in either world, given the weights that the sums so far have made, and decides
by the likelihood ratio. Its errors bound epsilon from below: by themselves, at a confidence of
99.8 %; and on the whole curve that Gaussian noise promises
(:func:`securevfl.lab.audit.audit_statistics.distinguishability`, at a confidence of 1 - 1e-6),
which finds smaller mistakes. The exit code is 1 if either is above the promise.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from securevfl.dp.gaussian import gaussian_epsilon, gaussian_noise_multiplier
from securevfl.dp.private_sgd import NoisedGradientSum
from securevfl.federation.rounds import fitting
from securevfl.lab.audit.audit_statistics import distinguishability
from securevfl.models.autoencoder import ChannelAutoencoder, small_encoder
from securevfl.models.layers import initialise

COMPONENTS = 2
# Of each of the two error probabilities' bounds: both hold in 998 audits of 1,000.
CHANCE = 0.001


@dataclass
class Overheard:
    """What a fitting's noised sums were made of, and what was said of them."""

    answers: list[Tensor] | None = None
    """Said again in place of fresh sums, if given: the other world's view of the same run."""

    exact: list[Tensor] = field(default_factory=list)
    said: list[Tensor] = field(default_factory=list)

    def mechanism(self, *, clip_norm: float, noise_multiplier: float) -> "Listener":
        """Return the installed mechanism, overheard."""
        return Listener(self, clip_norm=clip_norm, noise_multiplier=noise_multiplier)


class Listener(NoisedGradientSum):
    """The installed mechanism; its sums without noise are kept beside."""

    def __init__(self, overheard: Overheard, *, clip_norm: float, noise_multiplier: float) -> None:
        super().__init__(clip_norm=clip_norm, noise_multiplier=noise_multiplier)
        self._overheard = overheard
        self._silent = NoisedGradientSum(clip_norm=clip_norm, noise_multiplier=None)

    def __call__(self, gradients: Tensor) -> Tensor:
        """Return the noised sum, or what was said in the other world."""
        heard, exact = self._overheard, gradients.double()
        heard.exact.append(self._silent(exact))
        answer = heard.answers[len(heard.said)] if heard.answers else super().__call__(exact)
        heard.said.append(answer)
        return answer.to(gradients.dtype)


def fitted(records: Tensor, overheard: Overheard, *, steps: int, multiplier: float) -> Overheard:
    """Fit a fresh model as a run does, every record in every step."""
    features = records.shape[1]
    encoder = small_encoder(num_features=features, components=COMPONENTS)
    model = ChannelAutoencoder(encoder, num_features=features, components=COMPONENTS)
    initialise(model, seed=1, positions_seed=0)
    with mock.patch.object(fitting, "NoisedGradientSum", overheard.mechanism):
        fitting.pretrain(
            model,
            records,
            steps=steps,
            sampling_rate=1.0,
            noise_multiplier=multiplier,
            channel_std=1.0,
            generator=torch.Generator().manual_seed(2),
        )
    return overheard


def score(records: Tensor, *, there: bool, steps: int, multiplier: float) -> float:
    """Return what the attacker makes of one run: 0 on average without the record, 1 with it."""
    tables = {True: records, False: records[1:]}
    run = fitted(tables[there], Overheard(), steps=steps, multiplier=multiplier)
    other = fitted(tables[not there], Overheard(run.said), steps=steps, multiplier=multiplier)
    sums = {there: run.exact, not there: other.exact}
    apart = torch.stack(sums[True]) - torch.stack(sums[False])
    heard = torch.stack(run.said) - torch.stack(sums[False])
    return float((heard * apart).sum() / apart.square().sum())


def error_epsilon(without: np.ndarray, present: np.ndarray, *, delta: float) -> float:
    """Return the epsilon that the attacker's errors rule out anything below, whatever the noise."""
    false_alarms = _bound(int((without > 0.5).sum()), len(without))
    misses = _bound(int((present <= 0.5).sum()), len(present))
    pairs = ((false_alarms, misses), (misses, false_alarms))
    return max(0.0, *(math.log(max(1 - b - delta, 1e-300) / a) for a, b in pairs))


def curve_epsilon(without: np.ndarray, present: np.ndarray, *, delta: float) -> float:
    """Return the epsilon of the least private Gaussian noise that is not ruled out."""
    mu = distinguishability(without, present)
    return gaussian_epsilon(delta=delta, noise_multiplier=1 / mu) if mu > 0 else 0.0


def _bound(errors: int, trials: int) -> float:
    """Return an upper confidence bound on a probability ([CP34])."""
    return float(stats.beta.isf(CHANCE, errors + 1, max(trials - errors, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=600)
    parser.add_argument("--features", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--epsilon", type=float, default=1.0, help="what is promised")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--trials", type=int, default=1000, help="runs in each world")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    single = gaussian_noise_multiplier(epsilon=options.epsilon, delta=options.delta)
    multiplier = single * math.sqrt(options.steps)
    records = torch.from_numpy(
        np.random.default_rng(8).uniform(-1, 1, (options.records, options.features))
    ).float()
    scores = {
        there: np.array(
            [
                score(records, there=there, steps=options.steps, multiplier=multiplier)
                for _ in range(options.trials)
            ]
        )
        for there in (False, True)
    }
    found = {
        "promised_epsilon": options.epsilon,
        "delta": options.delta,
        "measured_by_errors": error_epsilon(scores[False], scores[True], delta=options.delta),
        "measured_on_the_curve": curve_epsilon(scores[False], scores[True], delta=options.delta),
        "false_alarms": float((scores[False] > 0.5).mean()),
        "misses": float((scores[True] <= 0.5).mean()),
    }
    measured = max(found["measured_by_errors"], found["measured_on_the_curve"])
    if options.json:
        print(json.dumps({**vars(options), **found}))
    else:
        print(
            f"promised epsilon {options.epsilon:g} at delta {options.delta:g}; measured at least "
            f"{found['measured_by_errors']:.2f} by errors alone, at least "
            f"{found['measured_on_the_curve']:.2f} on the Gaussian curve "
            f"({found['false_alarms']:.1%} false alarms, {found['misses']:.1%} misses)"
        )
    sys.exit(int(measured > options.epsilon))


if __name__ == "__main__":
    main()
