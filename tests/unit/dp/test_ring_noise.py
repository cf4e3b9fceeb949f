import hashlib
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
import torch

from securevfl.core.errors import ConfigError
from securevfl.dp.ring_noise import (
    MIN_STD_UNITS,
    ExactDiscreteGaussian,
    NoiseBuffer,
    NoiseTables,
    RingNoise,
)


def test_samples_have_the_shape_and_type_of_units() -> None:
    """They are added to quantised representations as they are."""
    noise = ExactDiscreteGaussian(100.0).sample((3, 4, 5))

    assert noise.shape == (3, 4, 5)
    assert noise.dtype == torch.int32
    assert ExactDiscreteGaussian(100.0).sample((0, 4)).numel() == 0


def test_no_two_samplers_and_no_two_calls_agree() -> None:
    """Each has its own key; each call moves on."""
    first, second = ExactDiscreteGaussian(1e6), ExactDiscreteGaussian(1e6)
    a, b, c = first.sample((100,)), first.sample((100,)), second.sample((100,))

    assert not torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_seed_must_be_called_insecure_and_repeats() -> None:
    """Tests can ask for the same samples again, under a name that greps."""
    one = ExactDiscreteGaussian(1e5, insecure_seed=3).sample((70_000,))
    same = ExactDiscreteGaussian(1e5, insecure_seed=3).sample((70_000,))
    other = ExactDiscreteGaussian(1e5, insecure_seed=4).sample((70_000,))

    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("std", "digest"),
    [(64.0, "b47b8454285df40f"), (1000.3, "657500160c9f2ffa"), (65536.0, "4479f63f9548d72a")],
)
def test_a_seed_gives_the_samples_that_it_always_gave(std: float, digest: str) -> None:
    """A change that is meant to change no number changes none; these are of 23 November 2026."""
    samples = ExactDiscreteGaussian(std, insecure_seed=7).sample((200_001,))

    assert hashlib.sha256(samples.numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_no_rejected_candidate_is_returned(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever share is rejected, batch after batch, and however far spare ones reach."""
    noise = ExactDiscreteGaussian(100.0, insecure_seed=1)
    monkeypatch.setattr(noise, "_tables", NoiseTables(100.0))
    noise._tables.cells &= ~0xFFFF  # no coin is sure, so that every candidate is decided
    decide, chance, marked = noise._decide, np.random.default_rng(2), 10**6

    def reject_many(
        out: npt.NDArray[np.int32], places: npt.NDArray[np.intp], *bits: Any
    ) -> npt.NDArray[np.bool_]:
        accepted = decide(out, places, *bits) & (chance.random(len(places)) >= share)
        out[places[~accepted]] = marked
        return accepted

    monkeypatch.setattr(noise, "_decide", reject_many)
    samples = noise.sample((20_000,))

    assert len(samples) == 20_000
    assert int(samples.abs().max()) < 100 * 20


@pytest.mark.parametrize("ahead", [False, True], ids=["sampler", "buffer"])
def test_a_forked_child_draws_other_noise(ahead: bool) -> None:
    """Two processes that add the same noise would let it be subtracted."""
    noise = ExactDiscreteGaussian(1e6)
    noise = NoiseBuffer(noise) if ahead else noise
    noise.sample((10,))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os.write(write, noise.sample((10,)).numpy().tobytes())
        os._exit(0)
    mine = noise.sample((10,)).numpy().tobytes()
    os.close(write)
    theirs = os.read(read, 40)
    os.waitpid(child, 0)
    os.close(read)

    if ahead:
        noise.close()

    assert len(theirs) == 40
    assert mine != theirs


def test_threads_never_get_the_same_noise() -> None:
    """One sampler may serve several threads."""
    noise = ExactDiscreteGaussian(2.0**26)
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda _: tuple(noise.sample((64,)).tolist()), range(40)))

    assert len(set(drawn)) == 40


@pytest.mark.parametrize("std", [63.9, 2.0**26 + 1, 0.0, -100.0, math.nan, math.inf])
def test_a_standard_deviation_outside_the_range_is_refused(std: float) -> None:
    """The message names the range; NaN fails."""
    with pytest.raises(ConfigError, match="standard deviation of 64 to"):
        ExactDiscreteGaussian(std)


def test_the_buffer_answers_with_fresh_noise_each_time() -> None:
    """What is drawn ahead is handed out once, and other sizes are drawn anew."""
    buffer = NoiseBuffer(ExactDiscreteGaussian(1e6))
    drawn = [buffer.sample((50,)) for _ in range(4)] + [buffer.sample((49,)), buffer.sample((50,))]
    buffer.close()

    assert [len(samples) for samples in drawn] == [50, 50, 50, 50, 49, 50]
    assert len({tuple(samples.tolist()[:49]) for samples in drawn}) == 6
    assert buffer.std_units == 1e6


def test_sampler_and_buffer_are_ring_noise() -> None:
    """Both can stand where a party's noise share is drawn."""
    noise = ExactDiscreteGaussian(64.0)
    buffer = NoiseBuffer(noise)

    assert isinstance(noise, RingNoise)
    assert isinstance(buffer, RingNoise)
    buffer.close()


def test_the_divergence_of_the_sum_is_nothing_from_64_units_on() -> None:
    """[KLS21] Theorem 1 at the least deviation that is allowed, for a thousand parties."""
    square = 2 * mpmath.pi**2 * mpmath.mpf(MIN_STD_UNITS) ** 2
    bound = 10 * mpmath.fsum(mpmath.exp(-square * j / (j + 1)) for j in range(1, 1000))
    assert bound < mpmath.mpf("1e-300")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_arrives_on_the_device() -> None:
    """A GPU party gets its noise where its representation is."""
    assert ExactDiscreteGaussian(100.0).sample((8,), device="cuda").is_cuda
