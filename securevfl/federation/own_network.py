"""The primary's own network without partners: a placebo that costs nobody anything.

A family's network averaged with the base may gain because two models that err differently are
better together, whatever partners know. So the same network is trained with nothing in the place
of releases, and the joint model has to be better than the average of that with the base.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from securevfl.core.progress import unheard
from securevfl.data.tables import PartyTable
from securevfl.federation.build import build_primary
from securevfl.federation.exchange_of_released_rows import ReleasedRows
from securevfl.federation.primary import Primary, PrimaryData
from securevfl.federation.rounds import EpochMark, RoundCounter
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.top_model import CorrectingTopModel


class NoPartners(ReleasedRows):
    """An exchange that answers with zeros, as if no linked record said anything."""

    def average_positions(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the primary's own weights: nobody else has any.

        Reveals:
            Nothing.
        """
        return dict(own)


def train_own_network(
    plan: RunPlan, table: PartyTable, data: PrimaryData, *, estimator: Any = None
) -> Primary | None:
    """Train the family's top model without partners, as the run trains it with them.

    It has the run's settings, seed, rows and links, so that it differs from the joint model's top
    model by what partners' columns say alone: how near links are follows from keys that both know.
    Pretrained weights, which partners had a part in, are not taken.

    Args:
        plan: The run.
        table: The primary's table.
        data: The same as tensors, with the base.
        estimator: Of scikit-learn, as a top model that no federation file can name.

    Returns:
        The primary at its best epoch; None for a family whose outputs correct the base, where
        nothing is left without partners.

    Reveals:
        Nothing: nobody is asked.
    """
    shape = plan.cut.shape
    zeros = torch.zeros((1, *shape)).expand(len(data.targets), *shape)
    ranks = tuple(plan.ranks[party.name] for party in plan.config.secondaries)
    exchange = NoPartners(zeros, ranks=ranks, rounds=RoundCounter(), device=data.features.device)
    own = build_primary(plan, table, data, exchange, observe=unheard, estimator=estimator)
    if isinstance(own, CorrectingTopModel):
        return None
    if data.base is not None:
        own.take_base(data.base)
    own.train(after_epoch=_keep_nothing)
    own.restore_best()
    return own


def _keep_nothing(_mark: EpochMark) -> None:
    pass
