"""Kept models without a run: the right parts with weights that are only drawn."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from securevfl import read_federation
from securevfl.config.federation import FederationConfig
from securevfl.data.scaling import FeatureScaler, KeyScaler, LabelScaler
from securevfl.data.tables import PartyTable
from securevfl.federation.build import build_bottom, build_top
from securevfl.federation.saved_model import FOLDER, PrimaryPart, SavedModel
from securevfl.models.tasks import TaskHead
from securevfl.runtime.run_folder import write_federation as write_file
from securevfl.testing import write_federation

FEATURES, KEYS = 3, 2
CLASSES = {"regression": None, "binary": ("no", "yes"), "multiclass": (0, 1, 2)}


def write_kept_run(folder: Path, *, task: str = "multiclass", **sections: Any) -> FederationConfig:
    """Write a run folder with a kept model of every party, of drawn weights."""
    federation = {"name": "test", "task": task, "seed": 3}
    config = read_federation(
        write_federation(folder, rows=20, secondaries=1, federation=federation, **sections)
    )
    write_file(folder, config)
    for number, party in enumerate(config.table_parties):
        kept(config, party.name, seed=number).save(folder / "parties" / party.name / FOLDER)
    return config


def kept(config: FederationConfig, name: str, *, seed: int = 0) -> SavedModel:
    """Return a kept model of one party, of drawn weights."""
    random = np.random.default_rng(seed)
    party, task = config.party(name), config.federation.task
    classes = CLASSES[task]
    head = TaskHead(task=task, num_classes=1 if classes is None else len(classes))
    names = tuple(f"x{axis}" for axis in range(FEATURES))
    table = PartyTable(
        name=name,
        key_names=("lon", "lat"),
        keys=np.zeros((1, KEYS)),
        feature_names=names,
        features=np.zeros((1, FEATURES), dtype=np.float32),
    )
    half = (
        build_top(config, table, head)
        if party.role == "primary"
        else build_bottom(config, party, table)
    )
    _stir(half, seed)
    label = LabelScaler(mean=5e5, deviation=3e4) if classes is None else None
    return SavedModel(
        party=name,
        role="primary" if party.role == "primary" else "secondary",
        federation=config.federation.name,
        digest=config.model_digest,
        run="0" * 32,
        family=config.family.name,
        settings=dict(config.source["model"]),
        features=names,
        schema=None,
        feature_scaler=FeatureScaler(
            centre=random.normal(size=FEATURES),
            width=random.uniform(1, 9, FEATURES),
            limit=2.0,
            data_independent=False,
        ),
        key_scale=KeyScaler(centre=(100.0, 200.0), width=(3.0, 7.0)),
        similarity_scale=None,
        noise_share_std=0.0,
        ledger_head="",
        weights=half.state_dict(),
        primary=PrimaryPart(head=head, classes=classes, label_scaler=label, rows=60)
        if party.role == "primary"
        else None,
    )


def _stir(model: nn.Module, seed: int) -> None:
    """Move all weights, so that what starts at zero has a part in what is computed."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape, generator=random), alpha=0.1)
