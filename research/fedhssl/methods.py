"""The methods of FedHSSL's Table IV on aligned views: pretrain once, fine-tune on few labels.

Pretraining is the package's own (``securevfl.stages.pretraining``), all parties in one process.
Fine-tuning is the package's split network (``securevfl.models.fedhssl.family``) with the plain
average that SplitAvg computes, without clipping (unless asked for) and without noise: what is
compared is what the encoders are worth, not what privacy costs.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from research.common.aligned.views import AlignedViews, ScarceRows
from securevfl.core.conventions import derive_seed, stream, unseeded_normal
from securevfl.core.devices import to_device
from securevfl.dp.clipping import clip_rows
from securevfl.federation.rounds.secondary import SecondaryData
from securevfl.federation.run_plan import RoundCounter
from securevfl.federation.session.peers import Peers, PeersHere, average_weights
from securevfl.lab.methods import BoostingConfig
from securevfl.lab.pooled_methods import fit_boosting
from securevfl.linkage.links import LinkTable
from securevfl.linkage.sampling import FixedLinks
from securevfl.models.family import PretrainingSettings
from securevfl.models.fedhssl.encoders import CategoricalColumn, FedHSSLConfig
from securevfl.models.fedhssl.family import FedHSSLBottom, FedHSSLTop
from securevfl.models.layers import initialise
from securevfl.models.optimisers import build_optimizer
from securevfl.models.registry import FAMILIES
from securevfl.models.tasks import TaskHead
from securevfl.stages.pretraining import parties
from securevfl.stages.pretraining.augment import CorruptedFeatures
from securevfl.stages.pretraining.learner import PartyLearner
from securevfl.stages.pretraining.learning import LearnerWithRecords, PretrainingRows
from securevfl.stages.pretraining.messages import PretrainingValidator
from securevfl.stages.pretraining.parties import PretrainingRun, PretrainingSecondary

PRETRAINED = ("fedlocalssl", "fedcssl", "fedgssl", "fedhssl")
SUPERVISED = ("boosting", "fedsplitnn", "untrained")

Encoders = dict[str, dict[str, Tensor]]
Measured = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Networks and training of one set; equal for all methods."""

    model: Mapping[str, Any]
    pretraining: Mapping[str, Any]
    learning_rate: float = 1e-3
    steps: int = 100
    epochs: int = 20
    batch_size: int = 128
    iso_projections: float = 0.0
    """lambda of the ISO noise on the primary's projections in pretraining."""
    iso_weights: float = 0.0
    """lambda of the ISO noise on the primary's weights before averaging."""
    iso_gradients: float = 0.0
    """lambda of the ISO noise on the gradient that the secondaries get in fine-tuning."""
    clip_norm: float | None = None
    """Length that secondaries' representations are cut to; None does not clip."""
    share: float = 1.0
    """Share of the training rows that secondaries learn from by themselves."""


@dataclass
class Prepared:
    """A set as tensors."""

    data: AlignedViews
    views: tuple[Tensor, ...]
    targets: Tensor
    labels: Tensor
    head: TaskHead
    columns: tuple[tuple[CategoricalColumn, ...], ...]


def prepare(data: AlignedViews, device: str) -> Prepared:
    binary = data.task == "binary"
    labels = torch.as_tensor(data.labels, device=device)
    return Prepared(
        data=data,
        views=tuple(torch.as_tensor(view, device=device) for view in data.views),
        targets=labels.float() if binary else labels,
        labels=labels,
        head=TaskHead(task=data.task, num_classes=data.classes),
        columns=tuple(
            tuple(CategoricalColumn((place,), number) for place, number in own)
            for own in (data.categories or ((),) * len(data.views))
        ),
    )


def pretrain(
    prepared: Prepared, setting: Setting, method: str, algorithm: str, rows: ScarceRows, seed: int
) -> tuple[list[Encoders], list[dict[str, Any]]]:
    """Return each party's encoders and the history."""
    config = family_config(method, setting)
    settings = PretrainingSettings(**{**setting.pretraining, "algorithm": algorithm})
    everything = np.arange(len(prepared.labels), dtype=np.int64)
    links = FixedLinks(
        table=LinkTable(
            indices=everything[:, None],
            distances=np.zeros((len(everything), 1)),
        )
    )

    def learning(party: int, own: np.ndarray) -> LearnerWithRecords:
        view = prepared.views[party]
        learner = PartyLearner(
            config,
            settings,
            num_features=view.shape[1],
            columns=prepared.columns[party],
            records=len(own),
            augment=augmentation(prepared, setting, party, own),
            party=f"party-{party}",
            seed=seed,
            device=view.device,
        )
        return LearnerWithRecords(learner, view, own, name=f"party-{party}", seed=seed)

    def fewer(own: np.ndarray) -> np.ndarray:
        drawn = stream(seed, "share").permutation(own)
        return np.sort(drawn[: round(setting.share * len(own))])

    def secondary(party: int) -> PretrainingSecondary:
        return PretrainingSecondary(
            SecondaryData(
                name=f"party-{party}",
                features=prepared.views[party],
                keys=torch.empty(len(everything), 0),
                links=links,
                primary_rows=len(everything),
            ),
            PretrainingValidator(
                settings,
                steps=FAMILIES[method].pretraining,
                learning_rows=len(rows.local),
                linked=np.ones(len(everything), dtype=np.bool_),
                done=0,
                take_round=nothing,
            ),
            settings,
            parties=len(prepared.views) - 1,
            build=lambda own: learning(party, fewer(own) if setting.share < 1 else own),
            save=nothing,
            finish=nothing,
            observe=nothing,
            log=nothing,
            restore=None,
        )

    secondaries = [secondary(party) for party in range(1, len(prepared.views))]
    run = PretrainingRun(
        learning(0, np.sort(rows.local)),
        PeersHere({rank: one.opening for rank, one in enumerate(secondaries, 1)}),
        PretrainingRows(
            aligned=np.sort(rows.aligned),
            own=np.sort(rows.local),
            # Rows of no experiment, if a set has them, are held out as well.
            held_out=np.setdiff1d(everything, rows.local),
        ),
        steps=FAMILIES[method].pretraining,
        rounds=RoundCounter(),
        save=nothing,
        observe=nothing,
    )
    own = run.learning.project
    run.learning.project = lambda records, **about: with_iso_noise(  # type: ignore[method-assign]
        own(records, **about), setting.iso_projections
    )
    with patch.object(parties, "average_weights", partial(noised_mean, setting.iso_weights)):
        run.run()
    learners = [run.learning.learner, *(one.learning.learner for one in secondaries)]
    return [learner.encoders() for learner in learners], run.history


def nothing(*_: Any, **_figures: Any) -> None:
    """Save no checkpoint, log and hear nothing."""


def family_config(method: str, setting: Setting) -> FedHSSLConfig:
    return FAMILIES[method].settings_class(**setting.model)


def augmentation(
    prepared: Prepared, setting: Setting, party: int, own: np.ndarray
) -> CorruptedFeatures:
    index = torch.as_tensor(own, device=prepared.views[party].device)
    return CorruptedFeatures(
        prepared.views[party][index],
        rate=setting.pretraining.get("corruption", 0.3),
        columns=prepared.columns[party],
    )


def fine_tune(
    prepared: Prepared,
    setting: Setting,
    method: str,
    encoders: list[Encoders] | None,
    labelled: np.ndarray,
    seed: int,
    learned: list[FedHSSLBottom] | None = None,
) -> Measured:
    """Train the joint model on the labelled rows, and measure it on the test rows.

    ``learned`` takes the secondaries' models as they are in the end.
    """
    config = family_config(method, setting)
    views, device = prepared.views, prepared.views[0].device
    with torch.random.fork_rng(devices=[]):
        bottoms = [
            FedHSSLBottom(config, num_features=view.shape[1], columns=columns)
            for view, columns in zip(views[1:], prepared.columns[1:], strict=True)
        ]
        top = FedHSSLTop(
            config,
            num_features=views[0].shape[1],
            outputs=prepared.head.outputs,
            columns=prepared.columns[0],
        )
    models: list[FedHSSLTop | FedHSSLBottom] = [top, *bottoms]
    for number, model in enumerate(models):
        initialise(model, seed=derive_seed(seed, "init", number), positions_seed=0)
        if encoders is not None:
            model.encoders.load_pretrained(encoders[number])
        model.to(device).train()
    optimizer = build_optimizer(
        "adamw",
        [parameter for model in models for parameter in model.parameters()],
        learning_rate=setting.learning_rate,
        weight_decay=1e-4,
    )
    rows = torch.as_tensor(labelled, device=device)
    batches = -(-len(rows) // setting.batch_size)
    steps = max(setting.steps, setting.epochs * batches)
    order = torch.Generator().manual_seed(derive_seed(seed, "shuffle"))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    shuffled = rows
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(derive_seed(seed, "dropout"))
        for step in range(steps):
            if step % batches == 0:
                shuffled = rows[torch.randperm(len(rows), generator=order).to(device)]
            batch = shuffled.tensor_split(batches)[step % batches]
            optimizer.zero_grad()
            outputs = joint(
                top,
                bottoms,
                views,
                batch,
                clip_norm=setting.clip_norm,
                iso_scale=setting.iso_gradients,
            )
            prepared.head.loss(outputs, prepared.targets[batch]).backward()
            optimizer.step()
            schedule.step()
    for model in models:
        model.eval()
    if learned is not None:
        learned += bottoms
    test = torch.as_tensor(prepared.data.test, device=device)
    with torch.no_grad():
        outputs = torch.cat(
            [
                joint(top, bottoms, views, part, clip_norm=setting.clip_norm)
                for part in test.split(2048)
            ]
        )
    return measure(prepared, outputs)


def represented(bottom: FedHSSLBottom, view: Tensor, rows: np.ndarray) -> np.ndarray:
    """Return what a secondary's model makes of its own records."""
    chosen = torch.as_tensor(rows, device=view.device)
    present = torch.ones(len(rows), 1, dtype=torch.bool, device=view.device)
    keys = torch.zeros(len(rows), 1, 1, device=view.device)
    with torch.no_grad():
        return bottom(view[chosen].unsqueeze(1), keys, present).flatten(1).double().cpu().numpy()


def joint(
    top: FedHSSLTop,
    bottoms: list[FedHSSLBottom],
    views: tuple[Tensor, ...],
    rows: Tensor,
    *,
    clip_norm: float | None = None,
    iso_scale: float = 0.0,
) -> Tensor:
    present = torch.ones(len(rows), 1, dtype=torch.bool, device=rows.device)
    keys = torch.zeros(len(rows), 1, 1, device=rows.device)
    given = [
        bottom(view[rows].unsqueeze(1), keys, present)
        for bottom, view in zip(bottoms, views[1:], strict=True)
    ]
    if clip_norm is not None:
        given = [clip_rows(vectors, clip_norm) for vectors in given]
    aggregate = torch.stack(given).mean(dim=0)
    if aggregate.requires_grad:
        aggregate.register_hook(lambda gradient: with_iso_noise(gradient, iso_scale))
    return top(views[0][rows], keys[:, 0], aggregate, None)


def measure(prepared: Prepared, outputs: Tensor) -> Measured:
    """Return the set's own metric as ``value``, with all others of its task.

    Of several classes, F1 and AUC (one against the rest) are means over the classes.
    """
    data = prepared.data
    targets = prepared.targets[torch.as_tensor(data.test, device=prepared.targets.device)]
    metrics = prepared.head.metrics(outputs.to(targets.device), targets)
    known = {name: value for name, value in metrics.items() if value is not None}
    measured = {name.removeprefix("macro_"): value for name, value in known.items()}
    return {"value": measured[data.metric], **measured}


def supervised(
    prepared: Prepared, setting: Setting, method: str, rows: ScarceRows, seed: int
) -> Measured:
    """Train a method that does not pretrain, and measure it on the test rows."""
    if method == "fedsplitnn":
        return fine_tune(prepared, setting, method, None, rows.labelled, seed)
    if method == "untrained":
        return fine_tune(prepared, setting, "fedhssl", None, rows.labelled, seed)
    labelled = torch.as_tensor(rows.labelled)
    test = torch.as_tensor(prepared.data.test)
    if prepared.data.metric == "f1":
        raise SystemExit("boosting: trees on pixels are not part of Table IV")
    _, outputs = fit_boosting(
        torch.cat([view.cpu() for view in prepared.views], dim=1),
        prepared.targets.cpu(),
        head=prepared.head,
        train=labelled,
        validation=labelled[:0],
        test=test,
        # Half the usual rounds: seconds a fit, and more gain nothing on few rows.
        config=BoostingConfig(iterations=50),
        seed=seed,
    )
    return measure(prepared, outputs)


def traffic(setting: Setting, history: list[dict[str, Any]], aligned: int) -> dict[str, float]:
    """Return what cross-party learning sends each way: float32 vectors of every aligned row."""
    settings = PretrainingSettings(**setting.pretraining)
    vectors = len(history) * settings.cross_epochs * aligned
    return {"megabytes": vectors * settings.projection_width * 4 / 1e6}


def with_pretraining(setting: Setting, **changed: Any) -> Setting:
    return dataclasses.replace(setting, pretraining={**setting.pretraining, **changed})


def noised_mean(
    scale: float, peers: Peers, request: Any, own: Mapping[str, Tensor], **about: Any
) -> dict[str, Tensor]:
    """Return all parties' mean of weights, the primary's with ISO noise.

    A batch norm's running statistics are no parameters: a noised variance may be negative.
    """
    sent = {
        name: value
        if name.endswith(("running_mean", "running_var"))
        else with_iso_noise(value, scale)
        for name, value in own.items()
    }
    return average_weights(peers, request, sent, **about)


def with_iso_noise(values: Float[Tensor, "*shape"], scale: float) -> Float[Tensor, "*shape"]:
    """Return the values with ISO noise: one deviation for all of them, set by the longest row.

    With the first axis as b rows, and all others together as the m numbers of a row, every number
    gets a normal number of deviation ``scale * max_i ||d_i||_2 / sqrt(m)``. The noise of a row is
    then about ``scale`` times as long as the longest row of the batch.

    **It promises nothing.** The length of the longest row is a function of private values, and
    whoever gets b m noised numbers reads it off their spread: of weights it says how
    long a layer's longest row is. Two batches
    that differ in that row get noise of two sizes, which can be told apart with certainty as b m
    grows; so no epsilon holds, whatever ``scale`` is.

    Args:
        values: d, such as projections (B, P), or weights with a row for each output; a single
            axis is b rows of one number.
        scale: lambda, dimensionless, >= 0; 0 returns the values as they are.

    Reveals:
        Nothing by itself. Of what is sent: noisy values, and the length of the longest row.

    References:
        [FedHSSL] section VI-B, Equation 7.
    """
    if not scale:
        return values
    rows = values.detach().reshape(len(values) if values.dim() else 1, -1)
    longest = torch.linalg.vector_norm(rows, dim=1).max()
    noise = to_device(torch.from_numpy(unseeded_normal(*values.shape)), values.device).to(values)
    return values + scale / math.sqrt(rows.shape[1]) * longest * noise
