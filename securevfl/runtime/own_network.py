"""The primary's own network: the family's top model, trained without partners.

A family's network averaged with the base may gain because two models that err differently are
better together, whatever partners know. So the same network is trained with nothing in the place
of releases, and the joint model has to be better than the average of that with the base.
"""

from typing import Any

import torch

from securevfl.core.progress import unheard
from securevfl.data.tables import PartyTable
from securevfl.federation.build import build_primary
from securevfl.federation.messages import EpochMark
from securevfl.federation.rounds.exchanges import ReleasedRows
from securevfl.federation.rounds.primary import Primary, PrimaryData
from securevfl.federation.run_plan import RoundCounter, RunPlan


def train_own_network(
    plan: RunPlan, table: PartyTable, data: PrimaryData, *, estimator: Any = None
) -> Primary:
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
        The primary at its best epoch.

    Reveals:
        Nothing: no party is asked.
    """
    shape = plan.cut.shape
    zeros = torch.zeros((1, *shape)).expand(len(data.targets), *shape)
    ranks = tuple(plan.ranks[party.name] for party in plan.config.secondaries)
    # Zeros, as if no linked record said anything.
    exchange = ReleasedRows(zeros, ranks=ranks, rounds=RoundCounter(), device=data.features.device)
    own = build_primary(plan, table, data, exchange, observe=unheard, estimator=estimator)
    if data.base is not None:
        own.take_base(data.base)
    own.train(after_epoch=_keep_nothing)
    own.restore_best()
    return own


def _keep_nothing(_mark: EpochMark) -> None:
    pass
