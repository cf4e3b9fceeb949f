"""What stands in for a GPU refuses what a GPU would refuse, and nothing else."""

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.labelled_cuda import CPU, CUDA, MixedDevices, labelled_cuda
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional


def there(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


REFUSED: dict[str, Callable[[], object]] = {
    "product": lambda: nn.Linear(3, 2).to("cuda")(torch.ones(4, 3)),
    "sum": lambda: there(2) + torch.ones(2),
    "into the CPU": lambda: torch.ones(2).add_(there(2)),
    "one number of the CPU": lambda: torch.tensor(1.0).add_(there(1)[0]),
    "labels": lambda: functional.cross_entropy(there(2, 3), torch.zeros(2, dtype=torch.int64)),
    "index": lambda: torch.ones(3)[torch.tensor([1], device="cuda")],
    "index of the CPU": lambda: there(3)[torch.tensor([1])],
    "assigned": lambda: there(3).__setitem__(torch.tensor([0, 1]), torch.ones(2)),
    "joined": lambda: torch.cat([there(2), torch.ones(2)]),
    "numpy": lambda: there(2).numpy(),
    "asarray": lambda: np.asarray(there(2)),
    "generator": lambda: torch.rand(2, generator=torch.Generator(), device="cuda"),
    "generator in place": lambda: there(2).normal_(generator=torch.Generator()),
    "state": lambda: torch.cuda.set_rng_state(torch.cuda.get_rng_state().to("cuda")),
    "state of the CPU": lambda: torch.cuda.set_rng_state(torch.get_rng_state()),
    "foreach": lambda: torch._foreach_add([there(2)], [torch.ones(2)]),
    "one row": lambda: vmap(lambda row: row + torch.ones(2))(there(3, 2)),
    "backward": lambda: _Sloppy.apply(there(2).requires_grad_()).sum().backward(),
}


class _Sloppy(torch.autograd.Function):
    """Makes a mask on the CPU, whatever its gradient is on."""

    @staticmethod
    def forward(_ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @staticmethod
    def backward(_ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.ones(2)


@pytest.mark.parametrize("name", REFUSED)
def test_mixed_devices_are_refused(name: str) -> None:
    """With the operation's name, and not as an error that a program would catch."""
    with labelled_cuda(), pytest.raises(MixedDevices):
        REFUSED[name]()


def test_what_a_gpu_takes() -> None:
    """Single numbers of the CPU, gradients through a move, and files with a device."""
    with labelled_cuda():
        assert (there(2) * torch.tensor(2.0)).device == CUDA
        assert there(3)[torch.tensor([1], device="cuda")].is_cuda
        assert there(2).to(torch.float64).device == CUDA
        assert torch.zeros_like(there(2)).device == there(2).new_zeros(3).device == CUDA
        assert copy.deepcopy(there(2)).device == CUDA
        own = torch.ones(2, requires_grad=True)
        (own.to("cuda") * 3).sum().backward()
        assert own.grad is not None
        assert own.grad.device == CPU
        file = io.BytesIO()
        torch.save({"there": there(2), "here": torch.ones(2)}, file)
        for wanted, found in ((None, CUDA), ("cpu", CPU)):
            file.seek(0)
            assert torch.load(file, map_location=wanted)["there"].device == found


def test_training_stays_on_the_device() -> None:
    """Weights, gradients, an optimizer's moments, and gradients of each row by itself."""
    with labelled_cuda():
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LayerNorm(4)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model(there(5, 3)).sum().backward()
        optimizer.step()
        weights = dict(model.named_parameters())
        kept = [*weights.values(), *(one.grad for one in weights.values())]
        kept += [one["exp_avg"] for one in optimizer.state.values()]
        each = vmap(
            grad(lambda own, row: functional_call(model, own, (row,)).sum()),
            in_dims=(None, 0),
            randomness="different",
        )
        kept += each(weights, there(5, 3)).values()
        assert {one.device for one in kept} == {CUDA}


def test_nothing_is_left_behind() -> None:
    """Afterwards torch is as it was."""
    before = dict(vars(torch.Tensor)), torch.zeros, torch.cuda.is_available
    with labelled_cuda():
        pass
    assert (dict(vars(torch.Tensor)), torch.zeros, torch.cuda.is_available) == before
