"""One party's self-supervised pretraining: losses, towers and optimizer steps.

B = rows of a batch, P = width of a projection, Q = negatives in a queue. Targets carry no gradient.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from securevfl.core.conventions import derive_seed
from securevfl.core.devices import computing_in, widen_floats
from securevfl.models.family import Algorithm, PretrainingSettings
from securevfl.models.fedhssl.encoders import (
    CategoricalColumn,
    Encoder,
    FedHSSLConfig,
    build_encoder,
    one_hot_columns,
)
from securevfl.models.layers import initialise
from securevfl.models.optimisers import build_optimizer
from securevfl.stages.pretraining.augment import CorruptedFeatures

# As in torch's normalize: a vector of zeros has no direction, and stays.
_SHORTEST: Final = 1e-12


def unit(vectors: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """Return the vectors scaled to length 1."""
    return functional.normalize(vectors, dim=1, eps=_SHORTEST)


def simsiam_loss(
    predicted: Float[Tensor, "rows width"], target: Float[Tensor, "rows width"]
) -> Float[Tensor, ""]:
    """Return the mean negative cosine between predictions and targets.

    The loss is linear in ``target``: for the mean of several parties' unit vectors, loss and
    gradient are the means of those for each party.

    Args:
        predicted: p, of any length.
        target: Unit vectors, or averages of unit vectors.

    References:
        [FedHSSL] Equation 4.
    """
    # Dividing after the product propagates the gradient through B instead of B P numbers.
    length = torch.linalg.vector_norm(predicted, dim=1).clamp_min(_SHORTEST)
    return -(torch.linalg.vecdot(predicted, target) / length).mean()


def byol_loss(
    predicted: Float[Tensor, "rows width"], target: Float[Tensor, "rows width"]
) -> Float[Tensor, ""]:
    """Return the mean of ``2 - 2 cos``; linear in ``target``, like :func:`simsiam_loss`.

    References:
        [FedHSSL] Equation 3, second line.
    """
    return 2 + 2 * simsiam_loss(predicted, target)


def moco_loss(
    predicted: Float[Tensor, "rows width"],
    target: Float[Tensor, "rows width"],
    *,
    negatives: Float[Tensor, "queue width"],
    temperature: float,
) -> Float[Tensor, ""]:
    """Return the InfoNCE loss of each row's target against the queue's negatives.

    Not linear in ``target``: the loss of an average is not the average of losses.

    Args:
        predicted: z, of any length.
        target: Unit vectors, or averages of unit vectors.
        negatives: The queue.
        temperature: Softmax temperature, > 0.

    References:
        [FedHSSL] Equation 2, with the temperature of appendix B-A.
    """
    query = unit(predicted)
    positive = torch.linalg.vecdot(query, target).unsqueeze(1)
    logits = torch.cat([positive, query @ negatives.T], dim=1) / temperature
    return functional.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64))


class NegativeQueue:
    """Queue of the last targets of one kind, for MoCo: first in, first out.

    Each kind has a separate queue, since negatives of another distribution are recognised by it and
    teach nothing; in the published code, cross-party vectors end up in the local queue.
    """

    def __init__(self, size: int, width: int, *, generator: torch.Generator) -> None:
        # As in [MoCo], random directions until there are real ones.
        self.vectors = unit(torch.randn(size, width, generator=generator))
        self._next = 0

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        self.vectors = self.vectors.to(device)

    def push(self, targets: Float[Tensor, "rows width"]) -> None:
        """Replace the oldest vectors."""
        size = len(self.vectors)
        targets = targets[-size:]
        places = torch.arange(self._next, self._next + len(targets), device=targets.device) % size
        self.vectors[places] = targets
        self._next = (self._next + len(targets)) % size

    def state(self) -> dict[str, Tensor | int]:
        """Return the state for a checkpoint."""
        return {"vectors": self.vectors, "next": self._next}

    def load_state(self, state: dict[str, Tensor | int]) -> None:
        """Restore a checkpoint's state."""
        vectors, following = state["vectors"], state["next"]
        assert isinstance(vectors, Tensor)
        assert isinstance(following, int)
        self.vectors, self._next = vectors.to(self.vectors.device), following


class Objective:
    """Loss of one algorithm against one kind of targets."""

    def __init__(
        self, algorithm: Algorithm, *, temperature: float, queue: NegativeQueue | None
    ) -> None:
        assert (algorithm == "moco") == (queue is not None), "moco alone has negatives"
        self.algorithm = algorithm
        self.temperature = temperature
        self.queue = queue

    def __call__(
        self,
        predicted: Float[Tensor, "rows width"],
        targets: Sequence[Float[Tensor, "rows width"]],
    ) -> Float[Tensor, ""]:
        """Return the mean loss over several targets of the same rows.

        References:
            [FedHSSL] Equation 5, first case.
        """
        losses = [self._loss(predicted, target) for target in targets]
        return torch.stack(losses).mean()

    def remember(self, targets: Sequence[Float[Tensor, "rows width"]]) -> None:
        """Store targets as negatives for later rows."""
        if self.queue is not None:
            for target in targets:
                self.queue.push(target)

    def _loss(self, predicted: Tensor, target: Tensor) -> Tensor:
        if self.queue is not None:
            return moco_loss(
                predicted, target, negatives=self.queue.vectors, temperature=self.temperature
            )
        loss = simsiam_loss if self.algorithm == "simsiam" else byol_loss
        return loss(predicted, target)


class Tower(nn.Module):
    """An online encoder with projector, predictor and target ([FedHSSL] figure 2).

    SimSiam's target is the online encoder itself; BYOL's and MoCo's is a follower, a moving average
    of its parameters. A follower always uses batch statistics; its running statistics are not used.
    """

    def __init__(self, encoder: Encoder, settings: PretrainingSettings, *, follows: bool) -> None:
        """Build a tower; :meth:`start` draws its weights.

        Args:
            encoder: The online encoder.
            settings: The ``[pretraining]`` table.
            follows: Whether to keep a moving average, if the algorithm has one.
        """
        super().__init__()
        self.encoder = encoder
        self.projector = _projector(encoder.width, settings.projector_widths)
        self.predictor: nn.Module = nn.Identity()
        if settings.algorithm != "moco":
            self.predictor = _predictor(settings.projection_width, settings.predictor)
        self.momentum = settings.target_momentum if follows else 0.0
        self.precision = settings.precision
        self.follower: nn.Module | None = None

    def start(self, *, seed: int) -> None:
        """Draw all weights from the party's own seed, and start the target as a copy."""
        self.follower = None
        initialise(self, seed=seed, positions_seed=0)
        if self.momentum:
            self.follower = nn.Sequential(
                copy.deepcopy(self.encoder), copy.deepcopy(self.projector)
            ).requires_grad_(False)

    def forward(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return the online encoder's projection."""
        return self._through(features, self.encoder, self.projector)

    def predict(self, projected: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Return the predictor's output for projections."""
        return self._through(projected, self.predictor)

    @torch.no_grad()
    def target(
        self,
        features: Float[Tensor, "rows features"],
        projected: Float[Tensor, "rows width"],
    ) -> Float[Tensor, "rows width"]:
        """Return the target projections, whose directions another view learns from.

        Args:
            features: The rows.
            projected: Their online projection, which is the target without a follower.
        """
        if self.follower is not None:
            return self._through(features, self.follower)
        return projected.detach()

    @torch.no_grad()
    def guide(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return the online encoder's unit vectors, from which another encoder learns.

        The tower does not change: batch statistics are those of ``features``, as in training, and
        running statistics are kept.
        """
        # Layers update running statistics in place: here, in copies.
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
        return unit(functional_call(self, buffers, (features,)))

    @torch.no_grad()
    def follow(self) -> None:
        """Move the target towards the online encoder; call it after every step."""
        if self.follower is None:
            return
        online: list[Tensor] = [*self.encoder.parameters(), *self.projector.parameters()]
        followers: list[Tensor] = [*self.follower.parameters()]
        torch._foreach_lerp_(followers, online, 1 - self.momentum)

    def shared_weights(self) -> dict[str, Tensor]:
        """Return the weights that parties average: the encoder's top, projector and predictor.

        References:
            [FedHSSL] Algorithm 1, line 30.
        """
        return {
            f"{number}.{name}": value
            for number, part in enumerate(self._shared_modules())
            for name, value in part.state_dict().items()
            if value.is_floating_point()
        }

    @torch.no_grad()
    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Load averaged weights."""
        for name, value in self.shared_weights().items():
            value.copy_(weights[name])

    def _through(self, values: Tensor, *parts: nn.Module) -> Tensor:
        with computing_in(self.precision, values.device):
            for part in parts:
                values = part(values)
        return widen_floats(values)

    def _shared_modules(self) -> tuple[nn.Module, ...]:
        return (self.encoder.top, self.projector, self.predictor)


def sphere_spread(vectors: Float[Tensor, "rows width"]) -> Float[Tensor, ""]:
    """Return the spread of unit vectors over the sphere: near 1 if even, 0 if collapsed.

    This is the standard deviation over rows, averaged over dimensions, in units of 1/sqrt(P), its
    value for uniform directions.

    References:
        [SimSiam] section 4.1 and figure 2, middle.
    """
    deviation = vectors.std(dim=0, correction=0).mean()
    return deviation * vectors.shape[1] ** 0.5


def _projector(inputs: int, widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, width in enumerate(widths):
        last = number == len(widths) - 1
        # Always batch statistics: they keep outputs from collapsing, and running ones would mix
        # views.
        norm = nn.BatchNorm1d(width, affine=not last, track_running_stats=False)
        layers += [
            nn.Linear(inputs, width, bias=False),
            norm,
            *([] if last else [nn.ReLU(inplace=True)]),
        ]
        inputs = width
    return nn.Sequential(*layers)


def _predictor(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False),
        nn.BatchNorm1d(hidden, track_running_stats=False),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, width),
    )


# [FedHSSL] appendix B-A, the size of MoCo's dictionary.
_QUEUE: Final = 4096


class PartyLearner:
    """Pretrains the encoders of one party; other parties' messages arrive as plain tensors.

    References:
        [FedHSSL] Algorithm 1.
    """

    def __init__(
        self,
        config: FedHSSLConfig,
        settings: PretrainingSettings,
        *,
        num_features: int,
        columns: Sequence[CategoricalColumn] = (),
        records: int,
        augment: CorruptedFeatures,
        party: str,
        seed: int,
        device: torch.device,
    ) -> None:
        """Build and initialise.

        Args:
            config: The model's settings, whose ``STEPS`` determine the towers.
            settings: The ``[pretraining]`` table.
            num_features: Feature columns of the party's table.
            columns: Its categorical columns.
            records: Number of its records, which limits the default length of queues.
            augment: Creates views of its records.
            party: Its name, for its own streams.
            seed: The run seed.
            device: Device to compute on.
        """
        self.settings = settings
        self.augment = augment
        self.device = device
        # Views are drawn on the device, to save a copy of large batches from the CPU.
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(derive_seed(seed, "augment", party))
        self.towers: dict[str, Tower] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        for name in ("cross", "local"):
            if name not in config.STEPS:
                continue
            with torch.random.fork_rng(devices=[]):
                encoder = build_encoder(config, num_features=num_features, columns=columns)
                # The other parties are the targets of a cross-party encoder.
                tower = Tower(encoder, settings, follows=name == "local")
            tower.start(seed=derive_seed(seed, "init", party, name))
            self.towers[name] = tower.to(device).train()
            self._optimizers[name] = self._optimizer(tower)
        self._objectives = {
            kind: self._objective(records, derive_seed(seed, "queue", party, kind))
            for kind in ("cross", "local", "guide")
        }
        self._pending: list[tuple[Tensor, Tensor]] = []
        """Rows of the last :meth:`project` and their projection, until :meth:`learn_cross`."""

    def begin_iteration(self, iteration: int) -> None:
        """Set the step size of an iteration, counted from 0, by half a cosine as in [SimSiam]."""
        factor = 0.5 * (1 + math.cos(math.pi * iteration / self.settings.iterations))
        for optimizer in self._optimizers.values():
            optimizer.param_groups[0]["lr"] = self.settings.learning_rate * factor

    def project(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return projections of aligned rows for other parties; :meth:`learn_cross` uses them too.

        Reveals:
            Nothing yet; the exchange of pretraining sends the result, protected or not.

        References:
            [FedHSSL] Algorithm 1, line 6.
        """
        projected = self.towers["cross"](features)
        self._pending = [(features, projected)]
        return projected.detach()

    def learn_cross(self, targets: Sequence[Float[Tensor, "rows width"]]) -> Float[Tensor, ""]:
        """Learn from other parties' projections of the rows of the last :meth:`project`.

        Args:
            targets: Unit vectors of the same rows, or their average; one or several.

        Returns:
            The first update's loss.

        References:
            [FedHSSL] Equation 5; section V-D for several updates from one exchange.
        """
        features, projected = self._pending.pop()
        tower, objective = self.towers["cross"], self._objectives["cross"]
        losses = []
        for update in range(self.settings.local_updates):
            if update:
                projected = tower(features)
            loss = objective(tower.predict(projected), targets)
            self._step("cross", loss)
            losses.append(loss.detach())
        objective.remember(targets)
        return losses[0]

    def learn_local(
        self, features: Float[Tensor, "rows features"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "views width"]]:
        """Learn from two views of the party's own records, guided by its cross-party encoder.

        The cross-party encoder does not change, nor do its running statistics.

        Returns:
            The loss, and the targets of both views, whose spread shows collapse.

        References:
            [FedHSSL] Equation 6 and Algorithm 1, lines 19 to 25.
        """
        tower, gamma = self.towers["local"], self.settings.guidance
        views = self.augment(torch.cat([features, features]), self.generator)
        parts = views.chunk(2) if self.settings.views == "apart" else (views,)
        projected = [tower(part) for part in parts]
        predicted = torch.cat([tower.predict(projection) for projection in projected])
        target = torch.cat([tower.target(*pair) for pair in zip(parts, projected, strict=True)])
        target = unit(target)
        # The mean over both views is the symmetrised loss: each half has the other's targets.
        other = target.roll(len(features), dims=0)
        loss = self._objectives["local"](predicted, [other])
        guide = None
        if "cross" in self.towers and gamma > 0:
            guide = torch.cat([self.towers["cross"].guide(part) for part in parts])
            # Equation 6 sums this term over the two views, but averages the first term.
            loss = loss + 2 * gamma * self._objectives["guide"](predicted, [guide])
        self._step("local", loss)
        self._objectives["local"].remember([target])
        if guide is not None:
            self._objectives["guide"].remember([guide])
        return loss.detach(), target

    def shared_weights(self) -> dict[str, Tensor]:
        """Return the weights that parties average."""
        return self.towers["local"].shared_weights()

    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Load averaged weights."""
        self.towers["local"].load_shared(weights)

    def encoders(self) -> dict[str, dict[str, Tensor]]:
        """Return a copy of the encoders' weights by name, for fine-tuning."""
        return {
            name: {key: value.clone() for key, value in tower.encoder.state_dict().items()}
            for name, tower in self.towers.items()
        }

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "towers": {name: tower.state_dict() for name, tower in self.towers.items()},
            "optimizers": {
                name: optimizer.state_dict() for name, optimizer in self._optimizers.items()
            },
            "queues": {
                kind: objective.queue.state()
                for kind, objective in self._objectives.items()
                if objective.queue
            },
            "generator": self.generator.get_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state."""
        for name, tower in self.towers.items():
            tower.load_state_dict(state["towers"][name])
            self._optimizers[name].load_state_dict(state["optimizers"][name])
        for kind, objective in self._objectives.items():
            if objective.queue:
                objective.queue.load_state(state["queues"][kind])
        self.generator.set_state(state["generator"].cpu())

    def _objective(self, records: int, seed: int) -> Objective:
        settings, queue = self.settings, None
        if settings.algorithm == "moco":
            # A longer queue would hold earlier targets of the same row among its negatives.
            size = settings.queue or max(1, min(_QUEUE, records // 2))
            generator = torch.Generator().manual_seed(seed)
            queue = NegativeQueue(size, settings.projection_width, generator=generator)
            queue.to(self.device)
        return Objective(settings.algorithm, temperature=settings.temperature, queue=queue)

    def _optimizer(self, tower: Tower) -> torch.optim.Optimizer:
        settings = self.settings
        optimizer = build_optimizer(
            settings.optimizer,
            [*tower.encoder.parameters(), *tower.projector.parameters()],
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        head = list(tower.predictor.parameters())
        if head:
            # [SimSiam] section 4.2: the predictor learns best at a constant rate.
            optimizer.add_param_group({"params": head})
        return optimizer

    def _step(self, name: str, loss: Tensor) -> None:
        optimizer, tower = self._optimizers[name], self.towers[name]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tower.follow()


def build_learner(
    settings: FedHSSLConfig,
    pretraining: PretrainingSettings,
    *,
    features: Float[Tensor, "records features"],
    feature_names: Sequence[str],
    party: str,
    seed: int,
) -> "PartyLearner":
    """Return a party's learner; arguments as in :meth:`Family.build_learner`.

    Raises:
        ConfigError: If the encoder does not fit the features.
    """
    return PartyLearner(
        settings,
        pretraining,
        num_features=features.shape[1],
        columns=settings.columns(feature_names),
        records=len(features),
        # A perceptron reads words as 0/1 columns, but a word is still replaced as a whole.
        augment=CorruptedFeatures(
            features, rate=pretraining.corruption, columns=one_hot_columns(feature_names)
        ),
        party=party,
        seed=seed,
        device=features.device,
    )
