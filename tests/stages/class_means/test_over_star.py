"""Class means over real connections: masks pass a primary that cannot read; who leaves is named."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers.built import Built, built
from helpers.class_means import (
    class_labels,
    fittings,
    primary_part,
    secondary_part,
    write_class_means,
)
from helpers.star import make_star, together

from securevfl.core.errors import ProtocolError
from securevfl.federation.over_star import PeersOverStar
from securevfl.federation.session.handshake import Joined
from securevfl.federation.session.peers import HandlerTable
from securevfl.lab.audit.audit_party import ThreadReply
from securevfl.stages.class_means.class_labels import ClassLabels
from securevfl.stages.class_means.messages import ClassMeansState
from securevfl.stages.class_means.parties import (
    AT_DEALER,
    AT_PRIMARY,
    AT_SECONDARY,
    ClassMeansPrimary,
    deal_class_sums,
    parties_of,
)
from securevfl.transport.channels import PrimaryChannels, SealedChannel
from securevfl.transport.star import PrimaryTransport, SecondaryTransport


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


def part_over_star(one: Built, told: ClassLabels, primary: PrimaryTransport) -> ClassMeansPrimary:
    """Return the primary's part, with secondaries and a dealer over the star."""
    config = one.plan.config
    ranks = {name: config.ranks[name] for name in parties_of(config)}
    lines = PrimaryChannels(primary, ranks, kinds=AT_PRIMARY, deadline_s=60)
    peers = PeersOverStar(primary, one.plan.secondaries, wait=config.waits.work)
    return primary_part(one, told, lines, peers=peers)


def deal_over_star(one: Built, end: SecondaryTransport) -> int:
    """Take the dealer's part."""
    config = one.plan.config
    lines = place(one, "dealer", end).channels(config, parties_of(config), AT_DEALER)
    return deal_class_sums(config, lines, one.plan.facts)


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
            fittings(one)[rank].finish = lambda sums: found.update({rank: sums})
            lines = place(one, name, ends[name]).channels(config, parties_of(config), AT_SECONDARY)
            table = HandlerTable(secondary_part(one, rank, lines).beside_rounds)
            call = ends[name].receive(table.kinds, round_number=0, deadline_s=60)
            table.handle(table.read(call), ThreadReply(lines, "agency"))

        results = together(
            [
                part_over_star(one, told, primary).before_release,
                lambda: secondary(1),
                lambda: secondary(2),
                lambda: deal_over_star(one, ends["dealer"]),
            ]
        )
        assert results == [None, None, None, 2]
        for rank, own in fittings(one).items():
            plain = own.format.by_bins(own.vectors(), told.bins_of_rows)
            np.testing.assert_array_equal(found[rank], plain)


@pytest.mark.parametrize("politely", [True, False])
def test_a_dealer_that_leaves_is_named(tmp_path: Path, politely: bool) -> None:
    """Whether it says farewell or fails: one line with its name, and no sum."""
    told = class_labels(120, label_noise=lambda sums: sums.noise(0.0))
    with federation(tmp_path) as (one, primary, ends):
        for name in ("bank-1", "bank-2"):
            ends[name].send(ClassMeansState(settled=False, numbers=4, columns=3).to_message())
        if politely:
            ends["dealer"].close()
        else:
            ends["dealer"].abort("fell over")
        with pytest.raises(ProtocolError, match="dealer") as error:
            part_over_star(one, told, primary).before_release()
        assert "\n" not in str(error.value)
