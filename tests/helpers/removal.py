"""A secondary built as a run builds it, on its table with or without one record, and its releases.

Noise of releases is left out, so that what is compared are the exact whole numbers that noise is
added to. What a world says behind noise (fitted encoders, updates) is said again in the other one:
given all that was said before, both go on from equal weights, as accounting does when it adds up
the steps of an adaptive composition.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from securevfl.config.link_spec import link_spec
from securevfl.config.reading import read_federation
from securevfl.data.rows import RowSplit
from securevfl.dp import class_sums
from securevfl.dp.ring_noise import RingNoise
from securevfl.federation import build
from securevfl.federation.exchange import Purpose, RoundPlan
from securevfl.federation.rounds import fitting, updates
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunPlan, plan_run, run_facts
from securevfl.ledger.ledger import Ledger
from securevfl.linkage import sampling
from securevfl.linkage.stage.parties import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.mpc.codec import decode_sum
from securevfl.runtime.run_tables import read_tables


class Silent:
    """Noise of a deviation that is never heard."""

    def __init__(self, std_units: float) -> None:
        self.std_units = std_units

    def sample(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return zeros."""
        return torch.zeros(tuple(shape), dtype=torch.int32, device=device)


class CoupledSamples:
    """Entropy of secret samples that is the same, record by record, in worlds with and without one.

    Takes the place of the module ``os`` where samples are drawn.
    """

    def __init__(self, records: int, *, gone: int | None) -> None:
        self._records = records
        self._gone = gone
        self.drawn: list[np.ndarray] = []
        """The numbers behind each sample, of all records that either world has."""

    def urandom(self, size: int) -> bytes:
        """Return the next sample's eight bytes a record, without those of the record not there."""
        random = np.random.default_rng([9, len(self.drawn)])
        numbers = random.integers(0, 2**64, self._records, dtype=np.uint64)
        self.drawn.append(numbers)
        kept = numbers if self._gone is None else np.delete(numbers, self._gone)
        assert size == kept.nbytes
        return kept.tobytes()

    def had(self, record: int, *, rate: float) -> list[bool]:
        """Return which samples so far the record was in."""
        return [bool(numbers[record] < int(rate * 2**64)) for numbers in self.drawn]


@dataclass
class Said:
    """What one world's mechanisms were given, exactly, and what they said of it behind noise."""

    exact: list[Tensor] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def say(self, exact: Tensor, answer: Callable[[], Any], before: "Said | None") -> Any:
        """Keep a sum; return what the world before said at this place, or a fresh answer."""
        self.exact.append(exact)
        self.answers.append(before.answers[len(self.answers)] if before else answer())
        return self.answers[-1]

    def changes(self, other: "Said") -> list[float]:
        """Return how far each exact sum is from the other world's."""
        return [
            float(torch.linalg.vector_norm(mine - theirs))
            for mine, theirs in zip(self.exact, other.exact, strict=True)
        ]


@dataclass
class World:
    """One secondary and what it has said so far."""

    secondary: Secondary
    plan: RunPlan
    split: RowSplit
    said: Said
    before: "Said | None"
    samples: "CoupledSamples"

    def release(self, rows: Sequence[int], *, number: int, purpose: Purpose = "release") -> Tensor:
        """Return a round's release in whole units of the ring, without noise, a vector a row."""
        cut = self.plan.cut
        with self.overheard():
            words = self.secondary.answer(self._round(rows, number, purpose))
        units = decode_sum(
            words, cut.ring, elements=len(rows) * math.prod(cut.shape), parties_active=1
        )
        return units.view(len(rows), -1).double()

    def learn(self, rows: Sequence[int], gradient: Tensor, *, number: int) -> None:
        """Let the secondary learn from the round that it has just answered."""
        with self.overheard():
            self.secondary.learn(self._round(rows, number, "train"), gradient)

    def release_all(self) -> Tensor:
        """Return the one pass of a frozen encoder over all rows, in batches as in a run."""
        rows, size = self.plan.facts.rows, self.plan.config.training.batch_size
        order = np.random.default_rng(4).permutation(rows)
        out = torch.zeros(rows, math.prod(self.plan.cut.shape), dtype=torch.float64)
        for number, start in enumerate(range(0, rows, size), start=1):
            batch = order[start : start + size].tolist()
            out[batch] = self.release(batch, number=number)
        return out

    @property
    def row_bound(self) -> float:
        """How far the plan lets one record move one row, in units of the ring."""
        cut, cap = self.plan.cut, self.plan.config.privacy.links_per_record
        assert cap is not None, "there is a bound"
        return self.plan.releases.sensitivity() / cap**0.5 * cut.slots / cut.ring.granularity

    def _round(self, rows: Sequence[int], number: int, purpose: Purpose) -> RoundPlan:
        return RoundPlan(
            round_number=number,
            rows=np.array(rows, dtype=np.int64),
            active=tuple(self.plan.secondaries),
            purpose=purpose,
        )

    @contextmanager
    def overheard(self) -> Iterator[None]:
        """Listen to every mechanism that what is done inside goes through."""
        said, before = self.said, self.before
        fitted, noised = class_sums.noised_moments, updates.GradientNoise.noised

        def statistics(records: np.ndarray, **settings: float) -> Any:
            exact = exact_moments(records, **settings)
            return said.say(exact, lambda: fitted(records, **settings), before)

        def update(noise: updates.GradientNoise, total: Tensor) -> Any:
            exact = total * noise.granularity / noise.clip_norm
            return said.say(exact, lambda: noised(noise, total), before)

        with (
            mock.patch.object(fitting, "noised_moments", statistics),
            mock.patch.object(updates.GradientNoise, "noised", update),
            mock.patch.object(sampling, "os", self.samples),
        ):
            yield


def exact_moments(records: np.ndarray, *, radius: float, noise_multiplier: float) -> Tensor:
    """Return the statistics that noise would be added to, over the change that it is made for."""
    deviations: list[float] = []

    def silent(size: int, *, std: float) -> np.ndarray:
        deviations.append(std)
        return np.zeros((size, size))

    with mock.patch.object(class_sums, "symmetric_noise", silent):
        found = class_sums.noised_moments(records, radius=radius, noise_multiplier=noise_multiplier)
    bound = deviations[0] / noise_multiplier
    unit = 2.0 ** round(math.log2(bound / (1.25 * radius**2)) / 2)
    first = np.concatenate([[math.trunc(radius / 2 * unit)], found.mean * unit])
    total = np.outer(first, first)
    total[1:, 1:] += found.covariance * unit**2
    return torch.from_numpy(total * found.count / bound)


def world(
    path: Path,
    *,
    gone: int | None = None,
    before: World | None = None,
    noise: Callable[[float], RingNoise] = Silent,
) -> World:
    """Build the first secondary of a federation file as a run does, but for the noise of releases.

    Args:
        path: The federation file, with its tables beside it.
        gone: A record to leave out of that secondary's table.
        before: The other world, whose answers behind noise are said again.
        noise: Takes the place of the sampler of releases' noise, behind its buffer.
    """
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    party, primary = config.secondaries[0], tables[config.primary.name]
    table = tables[party.name]
    samples = CoupledSamples(table.num_rows, gone=gone)
    if gone is not None:
        table = table.take(np.delete(np.arange(table.num_rows), gone))
    split, facts = run_facts(config, primary)
    plan = plan_run(config, facts)
    spec = link_spec(config)
    with (
        mock.patch.object(sampling, "os", samples),
        mock.patch.object(build, "ExactDiscreteGaussian", noise),
    ):
        secondary = build.build_secondary(
            plan,
            party,
            table,
            Linker(spec, keys_of(spec.keys, primary))(keys_of(spec.keys, table)),
            Ledger(
                None, party=party.name, plan=plan.releases, noise_share_std=plan.noise_share_std
            ),
            device=torch.device("cpu"),
        )
    said = before.said if before else None
    return World(secondary, plan, split, Said(), before=said, samples=samples)
