"""Small learners of FedHSSL's pretraining, and what they learn from."""

from pathlib import Path
from typing import Any, Final

import torch

from securevfl.federation.checkpoint import read_state
from securevfl.models.family import PretrainingSettings
from securevfl.models.fedhssl.encoders import FedHSSLConfig
from securevfl.stages.pretraining.augment import CorruptedFeatures
from securevfl.stages.pretraining.learner import PartyLearner

SMALL: Final[dict[str, Any]] = {"hidden": 16, "encoder_hidden": 16}


def encoders_of(run_folder: Path, party: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return the pretrained encoders that a party has kept."""
    return read_state(run_folder / "parties" / party / "encoders.pt")


def table(rows: int = 64, features: int = 6, seed: int = 0) -> torch.Tensor:
    """Return features of some records."""
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))


def learner(
    party: str = "a",
    kind: type[FedHSSLConfig] = FedHSSLConfig,
    features: int = 6,
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> PartyLearner:
    """Return a party's learner; keywords are settings of pretraining."""
    pretraining = PretrainingSettings(
        **{"projector": (16, 16, 8), "predictor": 8, "batch_size": 32, "queue": 16, **settings}
    )
    config = kind(**{**SMALL, **(model or {})})
    return PartyLearner(
        config,
        pretraining,
        num_features=features,
        records=64,
        augment=CorruptedFeatures(table(features=features), rate=0.3),
        party=party,
        seed=1,
        device=torch.device("cpu"),
    )


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return all weights as one vector."""
    return torch.cat([value.flatten() for value in weights.values()])
