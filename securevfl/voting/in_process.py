"""Votes in a simulation: the same sums and noise as between processes, without masks."""

from collections.abc import Callable, Sequence

import numpy as np

from securevfl.federation.ballot import Ballot
from securevfl.federation.secondary import Secondary


def vote_in_process(secondaries: Sequence[Secondary], make: Callable[[], Ballot]) -> None:
    """Let every secondary fit its votes.

    Args:
        secondaries: All of them.
        make: Charges for labels and returns the primary's rows by class; asked if it is needed.

    Raises:
        BudgetExceededError: If a secondary's budget forbids it.
        PrivacyError: If the noise leaves nothing to fit to.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    voters = [secondary.voter for secondary in secondaries if secondary.voter is not None]
    due = [voter for voter in voters if not voter.settled]
    if not due:
        return
    ballot = make()
    for voter in due:
        hidden = ballot.label_noise is not None
        voter.begin(leaves=hidden)
        if ballot.label_noise is None:
            sums = voter.by_labels(ballot.bins_of_rows, keep=ballot.keep)
        else:
            added = voter.format.by_bins(voter.vectors(), ballot.bins_of_rows) + voter.noise()
            sums = (added + ballot.label_noise(voter.format)).astype(np.float64)
        voter.finish(sums)
