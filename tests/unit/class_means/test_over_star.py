"""Class means over real connections: masks pass a primary that cannot read; who leaves is named."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers.built import Built, built
from helpers.class_means import class_labels, write_class_means
from helpers.star import make_star, together

from securevfl.core.errors import ProtocolError
from securevfl.federation.session.handshake import Joined
from securevfl.stages.class_means.class_means_stage import (
    ClassMeansKind,
    ClassMeansPrimary,
    ClassMeansSecondary,
    ClassMeansState,
    deal_over_star,
)
from securevfl.transport.channels import SealedChannel
from securevfl.transport.star import SecondaryTransport


def place(one: Built, name: str, transport: SecondaryTransport) -> Joined:
    """Return a caller's place in the session, with a key of each pair."""
    ranks = one.plan.config.ranks
    others = [other for other in ranks if ranks[other] and other != name]
    keys = {ranks[o]: bytes(sorted((ranks[o], ranks[name]))) * 16 for o in others}
    sealed = {
        o: SealedChannel(
            keys[ranks[o]],
            session=transport.session,
            own_rank=ranks[name],
            peer=o,
            peer_rank=ranks[o],
        )
        for o in others
    }
    return Joined(
        transport=transport,
        facts=one.plan.facts,
        pair_keys=keys,
        sealed=sealed,
        rank=ranks[name],
    )


@contextmanager
def federation(folder: Path):
    with (
        built(write_class_means(folder), folder / "run") as one,
        make_star(folder / "people", one.plan.config.ranks).joined() as (primary, ends),
    ):
        yield one, primary, ends


def test_class_means_are_fitted_over_the_star(tmp_path: Path) -> None:
    """The dealer's seeds reach secondaries sealed, through the primary; the sums are exact."""
    told = class_labels(120, label_noise=lambda sums: sums.noise(0.0))
    found: dict[int, np.ndarray] = {}
    with federation(tmp_path) as (one, primary, ends):
        config = one.plan.config

        def secondary(rank: int) -> None:
            name = one.plan.secondaries[rank]
            class_means = one.secondaries[rank].class_means
            class_means.finish = lambda sums: found.update({rank: sums})
            ends[name].receive(ClassMeansKind.CLASS_MEANS_CALL, round_number=0, deadline_s=60)
            ClassMeansSecondary.over(place(one, name, ends[name]), one.plan, class_means)()

        results = together(
            [
                lambda: ClassMeansPrimary.over(primary, one.plan)(lambda _due: told),
                lambda: secondary(1),
                lambda: secondary(2),
                lambda: deal_over_star(place(one, "dealer", ends["dealer"]), config),
            ]
        )
        assert results == [None, None, None, 2]
        for rank, own in one.secondaries.items():
            plain = own.class_means.format.by_bins(own.class_means.vectors(), told.bins_of_rows)
            np.testing.assert_array_equal(found[rank], plain)


@pytest.mark.parametrize("politely", [True, False])
def test_a_dealer_that_leaves_is_named(tmp_path: Path, politely: bool) -> None:
    """Whether it says farewell or fails: one line with its name, and no sum."""
    told = class_labels(120, label_noise=lambda sums: sums.noise(0.0))
    with federation(tmp_path) as (one, primary, ends):
        for name in ("bank-1", "bank-2"):
            ends[name].send(ClassMeansState(settled=False, numbers=4).to_message())
        if politely:
            ends["dealer"].close()
        else:
            ends["dealer"].abort("fell over")
        with pytest.raises(ProtocolError, match="dealer") as error:
            ClassMeansPrimary.over(primary, one.plan)(lambda _due: told)
        assert "\n" not in str(error.value)
