"""An encoder with what pretraining puts on top of it: projector, predictor and target."""

import copy
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from securevfl.models.fedhssl.encoders import Encoder
from securevfl.models.fedhssl.losses import unit
from securevfl.models.fedhssl.settings import PretrainingSettings
from securevfl.models.initial import initialise


class Tower(nn.Module):
    """An online encoder and its target ([FedHSSL] figure 2).

    SimSiam's target is the online encoder itself; BYOL's and MoCo's follows it slowly. A follower
    takes parameters alone: running statistics are those of the batches it saw itself, and nothing
    reads them, since it always uses a batch's own.
    """

    def __init__(self, encoder: Encoder, settings: PretrainingSettings, *, follows: bool) -> None:
        """Build it; :meth:`start` draws its weights.

        Args:
            encoder: The online encoder.
            settings: How to pretrain.
            follows: Whether it needs the moving average that the algorithm may have.
        """
        super().__init__()
        self.encoder = encoder
        self.projector = _projector(encoder.width, settings.projector_widths)
        self.predictor: nn.Module = nn.Identity()
        if settings.algorithm != "moco":
            self.predictor = _predictor(settings.projection_width, settings.predictor)
        self.momentum = settings.target_momentum if follows else 0.0
        self.follower: nn.Module | None = None

    def start(self, *, seed: int, shared_seed: int | None) -> None:
        """Draw all weights anew, and let the target start as a copy.

        Args:
            seed: The party's own.
            shared_seed: All parties', of what :meth:`shared_weights` returns; None lets these start
                apart, too.
        """
        self.follower = None
        initialise(self, seed=seed, positions_seed=0)
        if shared_seed is not None:
            for number, part in enumerate(self._shared()):
                initialise(part, seed=shared_seed + number, positions_seed=0)
        if self.momentum:
            self.follower = nn.Sequential(
                copy.deepcopy(self.encoder), copy.deepcopy(self.projector)
            ).requires_grad_(False)

    def forward(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return the online encoder's projection."""
        projected: Tensor = self.projector(self.encoder(features))
        return projected

    @torch.no_grad()
    def target(
        self,
        features: Float[Tensor, "rows features"],
        projected: Float[Tensor, "rows width"] | None,
    ) -> Float[Tensor, "rows width"]:
        """Return projections whose directions another view learns from.

        Args:
            features: The rows.
            projected: Their online projection, which is the target where there is no follower;
                computed here if it is not given.
        """
        if self.follower is not None:
            followed: Tensor = self.follower(features)
            return followed
        return self(features) if projected is None else projected.detach()

    @torch.no_grad()
    def guide(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return the online encoder's unit vectors, for another encoder to learn from.

        Nothing of the tower moves: batch statistics are those of ``features``, as in learning, and
        running statistics stay what they were.
        """
        # Layers write running statistics where they find them: here, in copies.
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
        return unit(functional_call(self, buffers, (features,)))

    @torch.no_grad()
    def follow(self) -> None:
        """Let the target move towards the online encoder; call it after every step."""
        if self.follower is None:
            return
        online: list[Tensor] = [*self.encoder.parameters(), *self.projector.parameters()]
        followers: list[Tensor] = [*self.follower.parameters()]
        torch._foreach_lerp_(followers, online, 1 - self.momentum)

    def shared_weights(self) -> dict[str, Tensor]:
        """Return what parties average: the encoder's top with its projector and predictor.

        References:
            [FedHSSL] Algorithm 1, line 30.
        """
        return {
            f"{number}.{name}": value
            for number, part in enumerate(self._shared())
            for name, value in part.state_dict().items()
            if value.is_floating_point()
        }

    @torch.no_grad()
    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Take averaged weights."""
        for name, value in self.shared_weights().items():
            value.copy_(weights[name])

    def _shared(self) -> tuple[nn.Module, ...]:
        return (self.encoder.top, self.projector, self.predictor)


def spread(vectors: Float[Tensor, "rows width"]) -> float:
    """Return how far unit vectors are spread over the sphere: near 1 evenly, 0 collapsed.

    The standard deviation over rows, averaged over dimensions, in units of 1/sqrt(P), which it has
    for directions drawn evenly.

    References:
        [SimSiam] section 4.1 and figure 2, middle.
    """
    deviation = vectors.std(dim=0, correction=0).mean()
    return float(deviation * vectors.shape[1] ** 0.5)


def _projector(inputs: int, widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, width in enumerate(widths):
        last = number == len(widths) - 1
        # Batch statistics, always: they keep the outputs from collapsing, and running ones would
        # be those of other views.
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
