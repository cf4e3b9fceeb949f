"""A federation file that asks for sparse masks: what is refused, told, and what reaches a run."""

import hashlib
from pathlib import Path

import pytest
import torch
from helpers.ring_keys import random_pair_keys

from securevfl import read_federation
from securevfl.config.disclosure import channels
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.federation.over_star import sum_from_secondary
from securevfl.federation.run_plan import RunFacts, plan_run
from securevfl.mpc.masks import PairwiseMasks
from securevfl.testing import write_federation
from securevfl.transport.star import SecondaryTransport

FACTS = RunFacts(rows=40, train_rows=30, validation_rows=5, test_rows=5)


def federation(folder: Path, *, secondaries: int, **privacy: object) -> FederationConfig:
    settings = {"mechanism": "none", "encoder": "trained", **privacy}
    return read_federation(
        write_federation(folder, secondaries=secondaries, rows=40, privacy=settings)
    )


@pytest.mark.parametrize(
    ("secondaries", "degree", "text"),
    [
        (16, 4, r"mask_degree: is offered from 17 secondaries on, and these are 16; leave it out"),
        (18, 18, r"mask_degree: 18 are all the others of 18 .* an even number of at most 16"),
        (17, 16, r"mask_degree: 16 are all the others of 17 .* an even number of at most 14"),
    ],
)
def test_a_federation_that_has_no_use_for_it_is_refused(
    tmp_path: Path, secondaries: int, degree: int, text: str
) -> None:
    """The complete graph is never weaker, and cheap where it is small."""
    with pytest.raises(ConfigError, match=text):
        federation(tmp_path, secondaries=secondaries, mask_degree=degree)


def test_the_threshold_is_told_and_the_masks_keep_to_it(tmp_path: Path) -> None:
    """`check` and run folders say how many helpers it takes; a run's masks have that degree."""
    config = federation(tmp_path, secondaries=17, mask_degree=6)
    ranks = tuple(range(1, 18))
    keys = random_pair_keys(ranks)[1]
    words, twin = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)

    told = next(one for one in channels(config) if one["channel"] == "masks")
    transport = object.__new__(SecondaryTransport)
    plan = plan_run(config, FACTS)
    _, masks = sum_from_secondary(transport, plan, keys, rank=1)
    masks.apply(words, round_number=1, active=ranks)
    by_hand = PairwiseMasks(1, keys, degree=6)
    agreed = repr((plan.cut, plan.training_rows)).encode()
    by_hand.bind(hashlib.sha256(agreed).digest(), ranks)
    by_hand.apply(twin, round_number=1, active=ranks)

    assert "the primary with up to 5 secondaries that help it" in told["reveals"]
    assert "with 6" in told["reveals"]
    assert (
        "from 6 helpers on (privacy.colluding = 0) nothing covers a single term"
        in told["guarantee"]
    )
    assert torch.equal(words, twin)


def test_without_it_nobody_is_told_of_masks(tmp_path: Path) -> None:
    """All masks with all is what the other channels take for granted."""
    names = [one["channel"] for one in channels(federation(tmp_path, secondaries=2))]

    assert "masks" not in names
