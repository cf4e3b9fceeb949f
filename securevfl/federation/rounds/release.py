"""What leaves a secondary: charged, computed, clipped, noised and encoded, in this one place."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int32, Int64, Shaped
from torch import Tensor

from securevfl.core.devices import reads
from securevfl.core.errors import PrivacyError
from securevfl.dp.laplace import GridScores
from securevfl.dp.ring_noise import NoiseBuffer, RingNoise
from securevfl.dp.symbols import SymbolNoise
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.cut import Aggregation, CutRows
from securevfl.mpc.codec import Words


@runtime_checkable
class Charge(Protocol):
    """Anything that charges a release before it is made, such as a ledger."""

    def charge(
        self, *, round_number: int, rows: Int64[np.ndarray, " batch"], purpose: str
    ) -> float:
        """Book a release and return the epsilon spent so far."""
        ...


class KeyedRelease(Charge, Protocol):
    """Any charge of rows that are released once a key."""

    def take_secret(self) -> bytes:
        """Return 32 random bytes that this release's draws follow from, and no other's."""
        ...

    def first_rows(self, rows: Int64[np.ndarray, " batch"]) -> Int64[np.ndarray, " batch"]:
        """Return the first row of each row's key."""
        ...

    def keep_symbols(
        self, firsts: Int64[np.ndarray, " batch"], drawn: Int64[np.ndarray, " batch"]
    ) -> Int64[np.ndarray, " batch"]:
        """Return what is sent: the symbols that were drawn, or a key's earlier one.

        Args:
            firsts: The first row of each row's key.
            drawn: Symbols, the same for rows of one key.
        """
        ...


@runtime_checkable
class Scores(Protocol):
    """What the records of a row leave as, in place of their numbers."""

    def first_rows(self, rows: Int64[np.ndarray, " batch"]) -> Int64[np.ndarray, " batch"]:
        """Return the row that each row's release is made of."""
        ...

    def draw(
        self, values: Float[Tensor, "batch links numbers"], rows: Int64[np.ndarray, " batch"]
    ) -> Float[Tensor, "batch links numbers"]:
        """Return what is sent of each row in its first slot; other slots are zero.

        Args:
            values: Numbers of each record; not finite where a slot holds none.
            rows: The primary's rows.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeySymbols:
    """One secondary's symbols, of which every key of the primary has one."""

    clip_norm: float
    """C, value of the largest number."""
    noise: SymbolNoise
    """Randomised response on the cells of rows."""
    keys: KeyedRelease
    """Charge of the release, which knows the rows of a key."""

    def first_rows(self, rows: Int64[np.ndarray, " batch"]) -> Int64[np.ndarray, " batch"]:
        """Return the first row of each row's key."""
        return self.keys.first_rows(rows)

    def draw(
        self, values: Float[Tensor, "batch links numbers"], rows: Int64[np.ndarray, " batch"]
    ) -> Float[Tensor, "batch links numbers"]:
        """Return each row's symbol as the numbers of its first slot; other slots are zero."""
        cells = self.noise.cells_of(values.double().cpu().numpy())
        firsts = self.keys.first_rows(rows)
        drawn = self.noise.draw(cells, firsts, secret=self.keys.take_secret())
        numbers = self.noise.values_of(self.keys.keep_symbols(firsts, drawn))
        return _in_first_slot(numbers * self.clip_norm, values)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowScores:
    """One secondary's scores or votes in whole grid units, one of every row."""

    scores: GridScores
    """Grid units of rows."""
    step: float
    """Value of a grid unit."""

    def first_rows(self, rows: Int64[np.ndarray, " batch"]) -> Int64[np.ndarray, " batch"]:
        """Return the rows: noise of its own makes each a release."""
        return rows

    def draw(
        self, values: Float[Tensor, "batch links numbers"], rows: Int64[np.ndarray, " batch"]
    ) -> Float[Tensor, "batch links numbers"]:
        """Return each row's grid units in its first slot; they are to be noised."""
        del rows
        units = self.scores.units_of(values.double().cpu().numpy())
        return _in_first_slot(units * self.step, values)


def _in_first_slot(
    numbers: Float64[np.ndarray, "batch numbers"], values: Float[Tensor, "batch links numbers"]
) -> Float[Tensor, "batch links numbers"]:
    sent = torch.zeros_like(values)
    sent[:, 0] = torch.from_numpy(numbers).to(values)
    return sent


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Released:
    """One secondary's part of one round."""

    words: Words
    """Words that enter the secure sum."""

    clipped: CutRows
    """Clipped rows behind the words, on the autograd graph if the round trains; they stay here."""

    epsilon: float
    """Epsilon spent, this release included."""


@dataclass(eq=False)
class SecondaryRelease:
    """One secondary's protected share of every aggregate."""

    aggregation: Aggregation
    """How representations are clipped and encoded."""
    _: KW_ONLY
    noise: RingNoise | None
    """Draws this party's noise share in units of the ring; None adds none."""
    scores: Scores | None = None
    """Makes what is sent of a row's records; None sends what is represented."""
    ledger: Charge
    """Books every release before it is made."""
    not_finite: int = field(default=0, init=False)
    """Rows, or records of pooled rows, that counted as zero since they were not finite."""

    @property
    def promised(self) -> bool:
        """Whether something is promised of what leaves, by noise or by symbols."""
        return self.noise is not None or self.scores is not None

    def first_rows(self, rows: Int64[np.ndarray, " batch"]) -> Int64[np.ndarray, " batch"]:
        """Return the row that each row's release is made of: of symbols, the first of its key."""
        return rows if self.scores is None else self.scores.first_rows(rows)

    def close(self) -> None:
        """Stop drawing noise ahead; later releases would have none ready."""
        if isinstance(self.noise, NoiseBuffer):
            self.noise.close()

    def release(
        self, plan: RoundPlan, represent: Callable[[RoundPlan], Tensor], *, learns: bool
    ) -> Released:
        """Charge, then compute, clip, round towards zero, add noise as integers, and encode.

        Scores and votes are made before that; a symbol has no noise then. Where something is
        promised, what is not finite counts as zero, or as no record: a run that stopped at it would
        tell everybody that such a record is there. Without a promise the run stops: training has
        diverged.

        Args:
            plan: The round.
            represent: Computes the round's representation, shape (B, L, H); called once it is paid
                for. Where scores are made of it, an empty slot is not finite.
            learns: Whether the clip belongs on the autograd graph.

        Raises:
            BudgetExceededError: If the budget forbids it; nothing is booked or computed then.
            EncodingRangeError: If a clipped norm is over C, a number leaves the ring, or, where
                nothing is promised, one is not finite.

        Reveals:
            Nothing by itself; what is made of the words is said at
            :class:`securevfl.mpc.codec.SumTo`.
        """
        epsilon = self.ledger.charge(
            round_number=plan.round_number, rows=plan.rows, purpose=plan.purpose
        )
        representation = represent(plan)
        with torch.set_grad_enabled(learns):
            if self.scores is not None:
                representation = self.scores.draw(representation, plan.rows)
            elif self.noise is not None:
                representation, lost = self.aggregation.finite(representation)
                reads().add(lost, self.count)
            clipped = self.aggregation.clip(representation)
        return Released(words=self.words(clipped), clipped=clipped, epsilon=epsilon)

    def count(self, lost: Shaped[Tensor, ""]) -> None:
        """Count what was not finite, once it is known."""
        self.not_finite += int(lost)

    def words(self, clipped: CutRows) -> Words:
        """Return this party's term with its noise share, as words."""
        return self.aggregation.cut.encode(self.units(clipped))

    def units(self, clipped: CutRows) -> Int32[Tensor, "batch pooled width"]:
        """Return this party's term in ring units, with its noise share."""
        # The promise of noise rests on the bound on norms; without noise there is none.
        units = self.aggregation.units(clipped, bounded=self.noise is not None)
        if self.noise is None:
            return units
        return units.add_(self.noise.sample(units.shape, device=units.device))


def require_finite(name: str, value: torch.Tensor, *, round_number: int) -> None:
    """Stop a run that has diverged, saying where.

    Raises:
        PrivacyError: If ``value`` has NaN or infinity; nothing was sent.
    """
    refuse = refuse_lost(name, round_number)

    def check(ends: Tensor) -> None:
        refuse(not all(map(math.isfinite, ends.tolist())))

    if value.numel():
        # NaN wins over every number here, and both ends take one kernel.
        reads().add(torch.stack(torch.aminmax(value.detach())), check)


def refuse_lost(name: str, round_number: int) -> Callable[[Tensor | bool], None]:
    """Return what stops a run, saying where, if it is given True: something is not finite."""

    def check(lost: Tensor | bool) -> None:
        if lost:
            raise PrivacyError(
                f"round {round_number}: {name} is not finite; training has diverged, "
                f"lower training.learning_rate"
            )

    return check
