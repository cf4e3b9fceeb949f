"""A small real secondary, for tests of what it answers and learns."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.cut import CutLayer, MeanOfRows
from securevfl.federation.rounds.release import Charge, SecondaryRelease
from securevfl.federation.rounds.secondary import Secondary, SecondaryData
from securevfl.federation.rounds.updates import DropoutStream
from securevfl.federation.session.peers import ReplyHere
from securevfl.federation.session.request_validator import RequestValidator, SessionLimits
from securevfl.linkage.links import LinkTable
from securevfl.linkage.sampling import FixedLinks
from securevfl.models.optimisers import PacedOptimizer
from securevfl.mpc.codec import RingFormat, Words

ROWS, RECORDS, LINKS, FEATURES, WIDTH = 12, 9, 3, 2, 4


class NoCharge:
    """Books nothing."""

    def charge(self, *, round_number: int, rows: np.ndarray, purpose: str) -> float:
        """Say that nothing is spent."""
        del round_number, rows, purpose
        return 0.0


class AnyRound(RequestValidator):
    """Admits every round, for tests of what a secondary does with one."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__(limits(frozen=frozen))

    def validate_round(self, plan: RoundPlan) -> None:
        """Let any round in."""
        del plan


def limits(
    *,
    train: int = 6,
    validation: int = 3,
    test: int = 3,
    batch_size: int = 2,
    epochs: int = 2,
    rank: int = 1,
    ranks: tuple[int, ...] = (1, 2),
    active: int = 2,
    average_positions_every: int = 0,
    frozen: bool = False,
) -> SessionLimits:
    """Return the limits of a small session."""
    return SessionLimits(
        rows=ROWS,
        part_rows={"train": train, "validation": validation, "test": test},
        batch_size=batch_size,
        epochs=epochs,
        rank=rank,
        ranks=ranks,
        active=active,
        average_positions_every=average_positions_every,
        single_pass="release" if frozen else None,
    )


class LinearBottom(nn.Module):
    """One linear layer and dropout on each link."""

    recordwise = False

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.positions = nn.Linear(FEATURES, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch links width"]:
        """Return one vector a link, zero where there is none."""
        del keys
        return self.dropout(self.positions(features)) * present[..., None]


def answer(secondary: Secondary, plan: RoundPlan) -> Words:
    """Return the words that a secondary answers a round with."""
    reply = ReplyHere()
    secondary.hear_round(plan, reply)
    (words,) = reply.words
    return words


def make_secondary(
    *,
    seed: int = 0,
    dropout: float = 0.0,
    clip_norm: float = 1.0,
    ledger: Charge | None = None,
    frozen: bool = False,
    validator: RequestValidator | None = None,
    bottom: nn.Module | None = None,
    row_by_row: bool = False,
    device: str = "cpu",
) -> Secondary:
    """Make a secondary with random records, links and weights."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    bottom = (bottom or LinearBottom(dropout)).to(device)
    indices = random.integers(-1, RECORDS, (ROWS, LINKS))
    indices = -np.sort(-indices, axis=1)
    distances = np.where(indices >= 0, 1.0, np.inf)
    ring = RingFormat.choose(clip_norm=clip_norm, noise_share_std=0.0, parties=3)
    return Secondary(
        SecondaryData(
            name=f"bank-{seed}",
            features=torch.from_numpy(random.normal(size=(RECORDS, FEATURES))).float().to(device),
            keys=torch.zeros(RECORDS, 2, device=device),
            links=FixedLinks(table=LinkTable(indices=indices, distances=distances)),
            primary_rows=ROWS,
        ),
        bottom,
        SecondaryRelease(
            MeanOfRows(
                CutLayer(ring=ring, slots=1, shape=(LINKS, WIDTH), clip_norm=clip_norm),
            ),
            noise=None,
            ledger=ledger or NoCharge(),
        ),
        validator=validator or AnyRound(frozen=frozen),
        dropout=DropoutStream(seed, "bank", device=torch.device(device)),
        optimizer=None
        if frozen
        else PacedOptimizer(torch.optim.SGD(bottom.parameters()), learning_rate=0.5),
        row_by_row=row_by_row,
    )
