"""FedCVT: a baseline on labelled, aligned and local rows of two parties."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from securevfl.config.methods import FedCVTConfig
from securevfl.core.conventions import derive_seed
from securevfl.core.errors import ConfigError, DataError
from securevfl.models.fedhssl.augment import CategoricalColumn
from securevfl.models.fedhssl.encoders import EncoderConfig, build_encoder
from securevfl.models.layers import initialise
from securevfl.models.optimisers import build_optimizer

# Estimate the representation that a row would have at the party that does not have it.


def attend(
    queries: Float[Tensor, "rows width"],
    keys: Float[Tensor, "others width"],
    values: Float[Tensor, "others value_width"],
    *,
    temperature: float,
    hidden: Bool[Tensor, "rows others"] | None = None,
) -> Float[Tensor, "rows value_width"]:
    """Return, for each query, the values averaged by how similar their keys are.

    Args:
        queries: Representations at the party that has the rows.
        keys: Representations of other rows at the same party.
        values: Those other rows' representations at the other party.
        temperature: Below 1 sharpens: weights are raised to the power 1/temperature.
        hidden: Others that a row must not use, itself for example.

    References:
        [FedCVT] section 4.2: scaled dot-product attention, sharpened. A softmax whose weights are
        raised to 1/T and normalised again is the softmax of scores over T.
    """
    scores = queries @ keys.T / (keys.shape[1] ** 0.5 * temperature)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=1) @ values


def agreed_labels(
    *logits: Float[Tensor, "rows classes"], confidence: float
) -> tuple[Tensor, Bool[Tensor, " rows"]]:
    """Return the classes that classifiers predict, and which rows they all agree on with trust.

    References:
        [FedCVT] section 4.3: a pseudo-label needs equal classes at all classifiers, each above a
        threshold.
    """
    votes = [one.softmax(dim=1).max(dim=1) for one in logits]
    trusted = torch.stack([vote.values > confidence for vote in votes]).all(dim=0)
    same = torch.stack([vote.indices == votes[0].indices for vote in votes]).all(dim=0)
    return votes[0].indices, trusted & same


# FedCVT's networks: two encoders a party, and three classifiers.


@dataclass(frozen=True, slots=True)
class Views:
    """One party's representations of some rows."""

    unique: Float[Tensor, "rows width"]
    """What this party alone may know of a row."""

    common: Float[Tensor, "rows width"]
    """What both parties know of it."""

    @property
    def joined(self) -> Float[Tensor, "rows both"]:
        """Both side by side."""
        return torch.cat([self.unique, self.common], dim=1)

    def __getitem__(self, rows: slice) -> "Views":
        return Views(self.unique[rows], self.common[rows])


class CvtParty(nn.Module):
    """One party's encoders."""

    def __init__(
        self, encoder: EncoderConfig, *, num_features: int, columns: Sequence[CategoricalColumn]
    ) -> None:
        super().__init__()
        self.unique = build_encoder(encoder, num_features=num_features, columns=columns)
        self.common = build_encoder(encoder, num_features=num_features, columns=columns)

    def forward(self, features: Float[Tensor, "rows features"]) -> Views:
        """Return the representations of rows."""
        return Views(self.unique(features), self.common(features))


class FedCVTNetwork(nn.Module):
    """Both parties and the classifiers, which are the primary's.

    References:
        [FedCVT] section 4.1.
    """

    def __init__(
        self,
        encoder: EncoderConfig,
        *,
        primary_features: int,
        other_features: int,
        columns: tuple[Sequence[CategoricalColumn], ...],
        classes: int,
    ) -> None:
        super().__init__()
        self.primary = CvtParty(encoder, num_features=primary_features, columns=columns[0])
        self.other = CvtParty(encoder, num_features=other_features, columns=columns[1])
        self.joint_head = nn.Linear(4 * encoder.width, classes)
        self.primary_head = nn.Linear(2 * encoder.width, classes)
        self.other_head = nn.Linear(2 * encoder.width, classes)

    def forward(
        self,
        primary: Float[Tensor, "rows primary_features"],
        other: Float[Tensor, "rows other_features"],
    ) -> Float[Tensor, "rows classes"]:
        """Return the joint classifier's logits of aligned rows."""
        return self.joint(self.primary(primary), self.other(other))

    def joint(self, primary: Views, other: Views) -> Float[Tensor, "rows classes"]:
        """Return the joint classifier's logits of representations, real or estimated."""
        logits: Tensor = self.joint_head(torch.cat([primary.joined, other.joined], dim=1))
        return logits


# Train FedCVT on labelled, aligned and local rows of two parties.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnownRows:
    """What two parties may learn from; row numbers are common to both."""

    labelled: Int[Tensor, " labelled_rows"]
    """Aligned rows with labels."""

    aligned: Int[Tensor, " aligned_rows"]
    """Aligned rows, the labelled ones among them."""

    local: Int[Tensor, " local_rows"]
    """Rows that each party has, aligned or not."""


def fit_fedcvt(
    views: tuple[Float[Tensor, "rows _"], ...],
    labels: Int[Tensor, " rows"],
    *,
    classes: int,
    rows: KnownRows,
    encoder: EncoderConfig,
    config: FedCVTConfig,
    seed: int,
    columns: tuple[Sequence[CategoricalColumn], ...] = ((), ()),
) -> FedCVTNetwork:
    """Train both parties' encoders and the three classifiers, in one process.

    A simplification of FedCVT, as a baseline of a simulation. Kept: unique and common
    representations, attention that estimates what the other party would say of a row, labels that
    three classifiers agree on, and the auxiliary losses. Left out: its exchange between processes;
    the label estimates by attention; thresholds of their own for each classifier.

    Args:
        views: Features of the primary and of the one secondary.
        labels: Class numbers; only those of labelled rows are read.
        classes: How many classes.
        rows: What is known.
        encoder: What each of the four encoders is made of.
        config: How to train.
        seed: Run seed.
        columns: Categorical columns of each party.

    Returns:
        The trained networks, in evaluation mode; calling them classifies aligned rows.

    Raises:
        ConfigError: If there are other than two parties.
        DataError: If no row is labelled.

    References:
        [FedCVT]; its code, yankang18/FedCVT @ bd21ad9.
    """
    if len(views) != 2:
        raise ConfigError(f"fedcvt is a method of two parties, got {len(views)}")
    if len(rows.labelled) < 2:
        raise DataError(f"fedcvt: needs labelled rows, got {len(rows.labelled)}")
    # Layers draw from torch's global generator before they are drawn again from their seeds.
    with torch.random.fork_rng(devices=[]):
        network = FedCVTNetwork(
            encoder,
            primary_features=views[0].shape[1],
            other_features=views[1].shape[1],
            columns=columns,
            classes=classes,
        )
    initialise(network, seed=derive_seed(seed, "init", "fedcvt"), positions_seed=0)
    network.to(views[0].device).train()
    optimizer = build_optimizer(
        "adamw",
        network.parameters(),
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
    )
    batches = -(-len(rows.labelled) // config.batch_size)
    order = torch.Generator().manual_seed(derive_seed(seed, "shuffle", "fedcvt"))
    shuffled = rows.labelled
    for step in range(config.passes(len(rows.labelled)) * batches):
        if step % batches == 0:
            shuffled = _draw(rows.labelled, len(rows.labelled), order)
        labelled = shuffled.tensor_split(batches)[step % batches]
        aligned, own, theirs = (
            _draw(part, config.batch_size, order) for part in (rows.aligned, rows.local, rows.local)
        )
        optimizer.zero_grad()
        loss = _loss(
            network,
            network.primary(views[0][torch.cat([labelled, aligned, own])]),
            network.other(views[1][torch.cat([labelled, aligned, theirs])]),
            labels[labelled],
            both=len(labelled) + len(aligned),
            config=config,
        )
        loss.backward()
        optimizer.step()
    return network.eval()


def _draw(rows: Tensor, number: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator)[:number].to(rows.device)]


def _loss(
    network: FedCVTNetwork,
    primary: Views,
    other: Views,
    labels: Tensor,
    *,
    both: int,
    config: FedCVTConfig,
) -> Float[Tensor, ""]:
    """Return the loss of one batch.

    Args:
        network: The classifiers.
        primary: Representations at the primary: of the labelled rows, the aligned ones, its own.
        other: The same at the secondary, whose own rows are others.
        labels: Of the first rows.
        both: How many rows both parties have.
        config: Weights and thresholds.
    """
    known, labelled = slice(0, len(labels)), len(labels)
    shared, local = slice(0, both), slice(both, None)
    loss = functional.cross_entropy(network.joint(primary[known], other[known]), labels)
    loss = loss + functional.cross_entropy(network.primary_head(primary[known].joined), labels)
    loss = loss + functional.cross_entropy(network.other_head(other[known].joined), labels)

    unlabelled = slice(labelled, both)
    candidates = [
        (primary[unlabelled], other[unlabelled]),
        (primary[local], _estimate(primary[local], primary[shared], other, both, config)),
        (_estimate(other[local], other[shared], primary, both, config), other[local]),
    ]
    loss = loss + sum(
        (_pseudo_label_loss(network, one, two, config.confidence) for one, two in candidates),
        start=torch.zeros_like(loss),
    )
    gap = (primary[shared].common - other[shared].common).square().mean()
    overlap = _overlap(primary) + _overlap(other)
    return (
        loss
        + config.common * gap
        + config.distinct * overlap
        + config.estimation * _estimation_error(primary[shared], other[shared], config)
    )


def _estimate(
    queries: Views, aligned: Views, other: Views, both: int, config: FedCVTConfig
) -> Views:
    """Estimate the other party's representations of rows that it does not have.

    Unique ones follow the aligned rows; common ones live in one space, so that they are sought
    among all rows of the other party.
    """
    return Views(
        attend(queries.unique, aligned.unique, other.unique[:both], temperature=config.sharpening),
        attend(queries.common, other.common, other.common, temperature=config.sharpening),
    )


def _pseudo_label_loss(
    network: FedCVTNetwork, primary: Views, other: Views, confidence: float
) -> Float[Tensor, ""]:
    joint = network.joint(primary, other)
    own, theirs = network.primary_head(primary.joined), network.other_head(other.joined)
    with torch.no_grad():
        classes, agreed = agreed_labels(joint, own, theirs, confidence=confidence)
    if not bool(agreed.any()):
        return torch.zeros((), device=joint.device)
    return functional.cross_entropy(joint[agreed], classes[agreed])


def _overlap(views: Views) -> Float[Tensor, ""]:
    return functional.cosine_similarity(views.unique, views.common).square().mean()


def _estimation_error(primary: Views, other: Views, config: FedCVTConfig) -> Float[Tensor, ""]:
    """Compare estimates of aligned rows, from the other aligned rows, with what they really are."""
    itself = torch.eye(len(primary.unique), dtype=torch.bool, device=primary.unique.device)
    error = torch.zeros((), device=primary.unique.device)
    for here, there in ((primary, other), (other, primary)):
        estimate = attend(
            here.unique, here.unique, there.unique, temperature=config.sharpening, hidden=itself
        )
        error = error + (estimate - there.unique).square().mean()
    return error
