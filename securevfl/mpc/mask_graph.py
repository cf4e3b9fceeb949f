"""Which secondaries share masks in a round: all with all, or each with its nearest on a ring.

Masks cancel along edges of a graph over the active secondaries. Whoever knows all masks of some of
them sees the others' words added up over each connected part of what is left of the graph, and
nothing else. So what protects one secondary's term is that few cannot cut it off from the others:
the graph's connectivity.

The sparse graph is the ring of the active secondaries in order of rank, each of them joined to the
``degree / 2`` nearest on either side: a circulant graph, whose connectivity is its degree.

References:
    [Har62] F. Harary. The Maximum Connectivity of a Graph. PNAS 48(7), 1962: the connectivity.
    [BBGLR20] J. Bell et al. Secure Single-Server Aggregation with (Poly)Logarithmic Overhead. CCS
    2020 (IACR ePrint 2020/704), section 3: sums under a sparse graph of masks. Theirs is drawn at
    random; why ours is not is in docs/threat-model.md.
"""

from collections.abc import Sequence


def neighbours(rank: int, active: Sequence[int], degree: int | None) -> tuple[int, ...]:
    """Return the ranks with which ``rank`` shares masks, in rising order.

    Args:
        rank: One of ``active``.
        active: All ranks of the round, in rising order.
        degree: How many each shares masks with, an even number; None, or as many as there are
            others: all of them.
    """
    parties = len(active)
    if degree is None or degree >= parties - 1:
        return tuple(other for other in active if other != rank)
    place, half = active.index(rank), degree // 2
    steps = (*range(-half, 0), *range(1, half + 1))
    return tuple(sorted(active[(place + step) % parties] for step in steps))


def connectivity(parties: int, degree: int | None) -> int:
    """Return how many of ``parties`` active secondaries it takes to cut another off.

    Any fewer, together with the primary, see the sum of all the others and nothing else.

    References:
        [Har62]: a circulant graph of even degree has that connectivity.

    Examples:
        >>> connectivity(50, 12)
        12
        >>> connectivity(10, 12), connectivity(10, None)
        (9, 9)
    """
    others = parties - 1
    return others if degree is None else min(degree, others)
