"""One party's pretraining: its towers, its optimizers, and the two kinds of steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.core.seeds import derive_seed
from securevfl.models.fedhssl.augment import Augmentation
from securevfl.models.fedhssl.columns import CategoricalColumn
from securevfl.models.fedhssl.encoders import build_encoder
from securevfl.models.fedhssl.fedhssl_config import FedHSSLConfig
from securevfl.models.fedhssl.losses import NegativeQueue, Objective, unit
from securevfl.models.fedhssl.settings import PretrainingSettings
from securevfl.models.fedhssl.towers import Tower
from securevfl.models.optimisers import build_optimizer

# [FedHSSL] appendix B-A, the size of MoCo's dictionary.
_QUEUE: Final = 4096


class PartyLearner:
    """Pretrains the encoders of one party; what others send comes in as plain tensors.

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
        augment: Augmentation,
        party: str,
        seed: int,
        device: torch.device,
    ) -> None:
        """Build and initialise.

        Args:
            config: The model's settings; its ``STEPS`` say which towers there are.
            settings: How to pretrain.
            num_features: Feature columns of the party's table.
            columns: Its categorical columns.
            records: Its records, which limit queues where the settings name no length.
            augment: Makes views of its records.
            party: Its name, for its own streams.
            seed: The run seed.
            device: Where to compute.
        """
        self.settings = settings
        self.augment = augment
        self.device = device
        # Drawn on the device: a view of a large batch is not worth a copy from the CPU.
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(derive_seed(seed, "augment", party))
        self.towers: dict[str, Tower] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        for name in ("cross", "local"):
            if name not in config.STEPS:
                continue
            with torch.random.fork_rng(devices=[]):
                encoder = build_encoder(
                    config.encoder_config, num_features=num_features, columns=columns
                )
                # The other parties are the targets of a cross-party encoder.
                follows = name == "local" or settings.sends == "target"
                tower = Tower(encoder, settings, follows=follows)
            shared = derive_seed(seed, "init", "shared", name)
            tower.start(
                seed=derive_seed(seed, "init", party, name),
                shared_seed=shared if settings.start == "shared" else None,
            )
            self.towers[name] = tower.to(device).train()
            self._optimizers[name] = self._optimizer(tower)
        self._objectives = {
            kind: self._objective(records, derive_seed(seed, "queue", party, kind))
            for kind in ("cross", "local", "guide")
        }
        self._pending: tuple[Tensor, Tensor] | None = None

    def begin_iteration(self, iteration: int) -> None:
        """Set the step size of an iteration, counted from 0: half a cosine, as in [SimSiam]."""
        factor = 0.5 * (1 + math.cos(math.pi * iteration / self.settings.iterations))
        for optimizer in self._optimizers.values():
            optimizer.param_groups[0]["lr"] = self.settings.learning_rate * factor

    def project(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return projections of aligned rows, for another party; the next step is on them.

        Reveals:
            Nothing by itself; it is what the exchange of pretraining protects or sends.

        References:
            [FedHSSL] Algorithm 1, line 6: the online encoder's. ``sends = "target"`` returns those
            of its moving average.
        """
        tower = self.towers["cross"]
        projected = tower(self._view(features))
        self._pending = (features, projected)
        return tower.target(features, projected)

    def learn_cross(self, targets: Sequence[Float[Tensor, "rows width"]]) -> Float[Tensor, ""]:
        """Learn from what other parties sent for the rows of the last :meth:`project`.

        Args:
            targets: Unit vectors of the same rows, or their average; one or several.

        Returns:
            The first update's loss.

        References:
            [FedHSSL] Equation 5; section V-D for several updates from one exchange.
        """
        assert self._pending is not None, "targets came without a projection"
        features, projected = self._pending
        self._pending = None
        tower, objective = self.towers["cross"], self._objectives["cross"]
        first: Tensor | None = None
        for update in range(self.settings.local_updates):
            if update:
                projected = tower(self._view(features))
            loss = objective(tower.predictor(projected), targets)
            self._step("cross", loss)
            first = loss.detach() if first is None else first
        objective.remember(targets)
        assert first is not None
        return first

    def learn_local(
        self, features: Float[Tensor, "rows features"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "views width"]]:
        """Learn from two views of the party's own records, guided by its cross-party encoder.

        The cross-party encoder stays as it is, running statistics included.

        Returns:
            The loss, and the targets of both views, whose spread tells of collapse.

        References:
            [FedHSSL] Equation 6 and Algorithm 1, lines 19 to 25.
        """
        tower, gamma = self.towers["local"], self.settings.guidance
        views = self.augment(torch.cat([features, features]), self.generator)
        parts = views.chunk(2) if self.settings.views == "apart" else (views,)
        projected = [tower(part) for part in parts]
        predicted = torch.cat([tower.predictor(one) for one in projected])
        target = torch.cat([tower.target(*one) for one in zip(parts, projected, strict=True)])
        target = unit(target)
        # The mean over both views is the symmetrised loss: each half has the other's targets.
        other = target.roll(len(features), dims=0)
        loss = self._objectives["local"](predicted, [other])
        guide = None
        if "cross" in self.towers and gamma > 0:
            guide = torch.cat([self.towers["cross"].guide(part) for part in parts])
            # Equation 6 sums over the two views here, where the first term is their mean.
            loss = loss + 2 * gamma * self._objectives["guide"](predicted, [guide])
        self._step("local", loss)
        self._objectives["local"].remember([target])
        if guide is not None:
            self._objectives["guide"].remember([guide])
        return loss.detach(), target

    def shared_weights(self) -> dict[str, Tensor]:
        """Return what parties average."""
        return self.towers["local"].shared_weights()

    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Take what parties averaged."""
        self.towers["local"].load_shared(weights)

    def encoders(self) -> dict[str, dict[str, Tensor]]:
        """Return a copy of the encoders' weights by name: what fine-tuning starts from."""
        return {
            name: {key: value.clone() for key, value in tower.encoder.state_dict().items()}
            for name, tower in self.towers.items()
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            "towers": {name: tower.state_dict() for name, tower in self.towers.items()},
            "optimizers": {name: one.state_dict() for name, one in self._optimizers.items()},
            "queues": {
                kind: one.queue.state() for kind, one in self._objectives.items() if one.queue
            },
            "generator": self.generator.get_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint's state."""
        for name, tower in self.towers.items():
            tower.load_state_dict(state["towers"][name])
            self._optimizers[name].load_state_dict(state["optimizers"][name])
        for kind, objective in self._objectives.items():
            if objective.queue:
                objective.queue.load_state(state["queues"][kind])
        self.generator.set_state(state["generator"].cpu())

    def _view(self, features: Tensor) -> Tensor:
        if not self.settings.augment_aligned:
            return features
        return self.augment(features, self.generator)

    def _objective(self, records: int, seed: int) -> Objective:
        settings, queue = self.settings, None
        if settings.algorithm == "moco":
            # A longer queue has every row's own target, pass after pass, among its negatives.
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
