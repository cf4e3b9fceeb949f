"""A GPU without a GPU: values stay on the CPU, and tensors carry the name of a device.

Inside :func:`labelled_cuda` a tensor that is made on ``"cuda"``, or moved there, is a CPU tensor
whose storage carries a label. ``.device`` and ``.is_cuda`` tell the label; every operation, those
of a backward pass and of ``torch.func`` among them, looks at the labels of its inputs and fails
with :class:`MixedDevices` where a GPU would, and labels its outputs. ``.numpy()`` of a labelled
tensor fails as on a GPU, a generator is of one device, and a file tells where its tensors were.
In one place it is stricter: a GPU's tensor may be indexed by a CPU's, which torch then copies and
waits for; here that is refused, so that every copy is one that the code names.
Since values are real, whole runs go through, with all that they decide by values; torch's own
``FakeTensorMode`` has no values, and a build of torch without CUDA cannot move a module with it.

A copy to the host without a wait has other numbers in it until the device was waited for, and
:func:`waits` counts how often that was, with all that waits by itself: reading a number, sizes that
depend on values, copies from memory that is not pinned.

What it does not see: operations of threads that are not :func:`watched`, speed, memory, kernels,
rounding.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
    "zeros_like",
)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

# Beside elementwise operations, which torch marks: a CPU tensor of one number may meet a GPU's.
_TAKES_ONE_NUMBER = ("fill", "index_put", "masked_fill", "where", "_foreach_")

_COPIES = ("copy_", "_copy_from", "copy")


class MixedDevices(AssertionError):
    """An operation that would fail on a GPU; no product code catches it."""


def _inner(tensor: Tensor) -> Tensor:
    """Return what the wrappers of ``torch.func`` are around."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _label_of(tensor: Tensor) -> torch.device | None:
    """Return where a tensor would be; None where only torch itself knows."""
    label: torch.device | None = getattr(_inner(tensor).untyped_storage(), "labelled_device", CPU)
    return label


def device_of(tensor: Tensor) -> torch.device:
    """Return where a tensor would be."""
    return _label_of(tensor) or CPU


def _label(tensor: Tensor, device: torch.device | None) -> None:
    _inner(tensor).untyped_storage().labelled_device = device  # type: ignore[attr-defined]


def _place(device: Any) -> torch.device:
    """Return the device that is meant, with an index as tensors have it."""
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if named.type == "cpu":
        return CPU
    assert named.type == "cuda", f"no labels for {named}"
    return CUDA


class _Move(torch.autograd.Function):
    """A copy on another device; its gradient goes back to where the input was."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, device: torch.device) -> Tensor:
        moved = tensor.clone()
        _label(moved, device)
        return moved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.device], output: Tensor) -> None:
        del output
        ctx.back = device_of(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _moved(gradient, ctx.back), None


def _moved(tensor: Tensor, device: torch.device, *, waits: bool = True) -> Tensor:
    if device_of(tensor) == device:
        return tensor
    _require_no_replay("a copy between host and device")
    moved: Tensor = _Move.apply(tensor, device)  # type: ignore[no-untyped-call]
    to_host = device == CPU
    if waits or not (to_host or getattr(tensor.untyped_storage(), "labelled_pinned", False)):
        _waits.update(["copy"])
    elif to_host:
        _copies().append((moved, moved.clone()))
        moved.fill_(_NOT_YET)
    return moved


_NOT_YET = 73
"""Fills a copy that has not been waited for."""

_UNDER_WAY = threading.local()


def _copies() -> list[tuple[Tensor, Tensor]]:
    """Return this thread's copies that have not been waited for: a thread waits for its own."""
    if not hasattr(_UNDER_WAY, "copies"):
        _UNDER_WAY.copies = []
    found: list[tuple[Tensor, Tensor]] = _UNDER_WAY.copies
    return found


_waits: Counter[str] = Counter()


def waits() -> Counter[str]:
    """Return how often the host has waited for the device since it is there, and for what."""
    return Counter(_waits)


class _Stream:
    """The device's one stream."""

    def synchronize(self) -> None:
        """Wait for it: what was copied without a wait is there now."""
        _waits.update(["synchronize"])
        for moved, value in _copies():
            moved.copy_(value)
        _copies().clear()


def _pinned(tensor: Tensor) -> Tensor:
    assert device_of(tensor) == CPU, "only memory of the host is pinned"
    pinned = tensor.clone()
    pinned.untyped_storage().labelled_pinned = True  # type: ignore[attr-defined]
    return pinned


# Operations whose result the host must know before it goes on.
_READS_A_NUMBER = ("_local_scalar_dense", "is_nonzero", "equal")
_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")


def _count_wait(name: str, args: tuple[Any, ...]) -> None:
    by_mask = name == "index" and any(
        isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1]
    )
    if by_mask or name in _READS_A_NUMBER + _SIZED_BY_VALUES:
        _require_no_replay(f"{name} waits")
        _waits.update([name])


def _require_no_replay(reason: str) -> None:
    assert not getattr(_UNDER_WAY, "replays", False), f"a graph holds the device's work: {reason}"


_TRUE_GENERATOR = torch.Generator


class _Generator(_TRUE_GENERATOR):
    """A generator that says of which device it is; numbers are the CPU's."""

    labelled_device: torch.device

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made.labelled_device = _place(device)
        _GENERATORS[made._cdata] = made  # type: ignore[attr-defined]
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.labelled_device

    def get_state(self) -> Tensor:
        state = super().get_state()
        return state if self.labelled_device == CPU else _as_of_a_gpu(state)

    def set_state(self, state: Tensor) -> "_Generator":
        _require_cpu_state(state)
        super().set_state(state if self.labelled_device == CPU else _as_of_the_cpu(state))
        return self


# Operations see another Python object of the same generator.
_GENERATORS: WeakValueDictionary[int, _Generator] = WeakValueDictionary()


def _require_cpu_state(state: Tensor) -> None:
    if device_of(state) != CPU:
        raise MixedDevices("the state of a generator must be a CPU tensor")


def _as_of_a_gpu(state: Tensor) -> Tensor:
    """Return a state of another length: a GPU's generator takes none of the CPU's."""
    return torch.cat([state, state.new_ones(1)])


def _as_of_the_cpu(state: Tensor) -> Tensor:
    if len(state) != len(torch.get_rng_state()) + 1:
        raise MixedDevices("the state is one of a CPU's generator")
    return state[:-1].clone()


def _require_generator(generator: Any, device: torch.device, name: str) -> None:
    if generator is None:
        return
    known = _GENERATORS.get(generator._cdata)
    own = CPU if known is None else known.device
    if own != device:
        raise MixedDevices(f"{name}: a generator of {own} for a tensor on {device}")


_done: Counter[str] = Counter()


def operations() -> int:
    """Return how many operations the device has done since it is there."""
    return _done[str(CUDA)]


class _Labels(TorchDispatchMode):
    """Looks at the inputs of every operation of this thread, and labels its outputs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        device = _common(func, args, inputs)
        for given in (*args, *kwargs.values()):
            if device and isinstance(given, _TRUE_GENERATOR):
                _require_generator(given, device, str(func))
        out = func(*args, **kwargs)
        _done[str(device)] += 1
        if device == CPU:
            _require_no_replay(f"{func} on the host")
        if device == CUDA:
            _count_wait(func._schema.name.partition("::")[2], args)
        if device != CPU:
            # Without inputs it is torch's own work, and goes with whatever it meets first.
            known = {one.untyped_storage()._cdata for one in inputs}
            for one in tree_leaves(out):
                if isinstance(one, Tensor) and one.untyped_storage()._cdata not in known:
                    _label(one, device)
        return out


def _common(func: Any, args: tuple[Any, ...], inputs: list[Tensor]) -> torch.device | None:
    """Return where an operation runs; None where nothing says.

    Raises:
        MixedDevices: If its inputs are not all there.
    """
    name = func._schema.name.partition("::")[2]
    if name in _COPIES:
        return device_of(args[0])
    open_ones = [one for one in inputs if _label_of(one) is None]
    devices = {label for one in inputs if (label := _label_of(one)) is not None}
    if len(devices) == 1:
        for one in open_ones:
            _label(one, *devices)
    if len(devices) <= 1:
        return devices.pop() if devices else None
    one_number = torch.Tag.pointwise in func.tags or name.startswith(_TAKES_ONE_NUMBER)
    written = func._schema.arguments and func._schema.arguments[0].is_write
    into = [one for one in tree_leaves(args[:1]) if isinstance(one, Tensor)] if written else []
    if (
        one_number
        and all(device_of(one) == CUDA for one in into)
        and all(device_of(one) == CUDA or one.ndim == 0 for one in inputs)
    ):
        return CUDA
    shown = ", ".join(f"{tuple(one.shape)} on {device_of(one)}" for one in inputs)
    raise MixedDevices(f"{name}: inputs are on several devices: {shown}")


def _to(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to(self: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        other = kwargs.get("other", args[0] if args else None)
        if isinstance(other, Tensor):
            device, dtype, form = device_of(other), other.dtype, torch.preserve_format
            without_wait = False
        else:
            device, dtype, without_wait, form = torch._C._nn._parse_to(*args, **kwargs)
            form = torch.preserve_format if form is None else form
        place = device_of(self) if device is None else _place(device)
        moved = _moved(self, place, waits=not without_wait)
        again = copy and moved is self
        return original(
            moved, dtype=self.dtype if dtype is None else dtype, copy=again, memory_format=form
        )

    return to


def _factory(original: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made = original(*args, **kwargs)
        if device is not None:
            _label(made, _place(device))
        elif _label_of(made) is None:
            _label(made, CPU)
        _require_generator(kwargs.get("generator"), device_of(made), name)
        return made

    return make


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    made = data if isinstance(data, Tensor) else _AS_TENSOR(data)
    made = made if dtype is None else made.to(dtype)
    return made if device is None else _moved(made, _place(device))


_AS_TENSOR = torch.as_tensor


def _on_cpu(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def there(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if device_of(self) != CPU:
            raise MixedDevices(f"{name}: the tensor is on {device_of(self)}; .cpu() comes first")
        return original(self, *args, **kwargs)

    return there


def _deepcopy(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def deepcopy(self: Tensor, memo: Any) -> Tensor:
        copied = original(self, memo)
        _label(copied, device_of(self))
        return copied

    return deepcopy


def _get_rng_state(device: Any = "cuda") -> Tensor:
    del device
    return _as_of_a_gpu(torch.get_rng_state())


def _set_rng_state(state: Tensor, device: Any = "cuda") -> None:
    del device
    _require_cpu_state(state)
    torch.set_rng_state(_as_of_the_cpu(state))


def _capture(
    compute: Callable[..., Tensor], sample: Sequence[Tensor], weights: Sequence[Tensor]
) -> Callable[..., Tensor]:
    """Return what a GPU would replay: it goes with inputs like the samples, and never waits."""

    def like(inputs: Sequence[Tensor]) -> list[Any]:
        return [(one.shape, one.dtype, device_of(one), one.requires_grad) for one in inputs]

    def replay(*inputs: Tensor) -> Tensor:
        assert like(inputs) == like([*sample, *weights]), (
            "a graph is of the shapes that it was captured with"
        )
        _UNDER_WAY.replays = True
        try:
            return compute(*inputs)
        finally:
            _UNDER_WAY.replays = False

    assert all(device_of(one) == CUDA for one in [*sample, *weights]), "a graph is of one device"
    return replay


def _tag(storage: Any) -> str | None:
    return "cuda:0" if getattr(storage, "labelled_device", CPU) == CUDA else None


def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("cuda"):
        return None
    storage.labelled_device = CUDA
    return storage


_GUARD = threading.Lock()


def watched() -> TorchDispatchMode:
    """Watch another thread's operations too, as a context, within :func:`labelled_cuda`."""
    return _Labels()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def labelled_cuda() -> Iterator[torch.device]:
    """Pretend that there is a GPU, and watch it in this thread; yields the device."""
    tensor: Any = torch.Tensor
    patches: list[Any] = [
        patch.object(tensor, "device", property(device_of), create=True),
        patch.object(tensor, "is_cuda", property(lambda one: device_of(one) == CUDA), create=True),
        patch.object(tensor, "is_cpu", property(lambda one: device_of(one) == CPU), create=True),
        patch.object(tensor, "to", _to(tensor.to)),
        patch.object(tensor, "cpu", lambda one, **_: _moved(one, CPU)),
        patch.object(tensor, "pin_memory", _pinned),
        patch.object(tensor, "cuda", lambda one, *_, **__: _moved(one, CUDA)),
        patch.object(tensor, "type_as", lambda one, other: one.to(other)),
        patch.object(tensor, "__deepcopy__", _deepcopy(tensor.__deepcopy__)),
        patch.object(torch, "as_tensor", _as_tensor),
        patch.object(torch, "Generator", _Generator),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: 1),
        patch.object(torch.cuda, "current_stream", lambda _device=None: _Stream()),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch("securevfl.models.cuda_graphs._Captured", _capture),
        patch.object(torch.cuda, "get_rng_state", _get_rng_state),
        patch.object(torch.cuda, "set_rng_state", _set_rng_state),
        patch.object(
            torch.serialization,
            "_package_registry",
            [(0, _tag, _restore), *torch.serialization._package_registry],
        ),
    ]
    patches += [
        patch.object(tensor, name, _on_cpu(getattr(tensor, name), name))
        for name in ("numpy", "__array__", "__dlpack__")
    ]
    patches += [
        patch.object(owner, name, _factory(getattr(owner, name), name))
        for owner, names in ((torch, _FACTORIES), (tensor, _METHODS))
        for name in names
    ]
    with _GUARD, contextlib.ExitStack() as stack:
        _done.clear()
        _waits.clear()
        _copies().clear()
        for one in patches:
            stack.enter_context(one)
        stack.enter_context(watched())
        yield CUDA
