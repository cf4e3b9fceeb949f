"""The dealer's part in class means: masks for each secondary's class sums."""

from collections.abc import Sequence

from securevfl.config.federation import FederationConfig
from securevfl.federation.run_facts import RunFacts
from securevfl.mpc import dealt_sums
from securevfl.stages.class_means.class_labels import bins_of
from securevfl.stages.class_means.messages import (
    ClassMeansDealing,
    ClassMeansKind,
    ClassMeansSeed,
    ClassMeansTurn,
)
from securevfl.transport.channels import Channels, Kinds
from securevfl.transport.message import StarKind

AT_DEALER: Kinds = (ClassMeansKind.CLASS_MEANS_TURN, StarKind.DONE)


def parties_of(config: FederationConfig) -> Sequence[str]:
    """Return the names of all that class sums under masks concern; the coordinator may be gone."""
    return [
        party.name
        for party in (config.primary, *config.callers)
        if party.role in ("primary", "secondary", "dealer")
    ]


def deal_class_sums(config: FederationConfig, lines: Channels, facts: RunFacts) -> int:
    """Deal masks for each secondary's class sums, until the primary is done.

    Args:
        config: The federation file, whose encoders are class means.
        lines: To everybody.
        facts: The run's id and the primary's rows, as the primary says. Each secondary compares
            them with what it was told itself.

    Returns:
        For how many secondaries.

    Raises:
        ProtocolError: If the primary asks for the masks of one secondary twice, or fails.

    Reveals:
        To the primary and to each secondary: uniform numbers.
    """
    names = {config.ranks[party.name]: party.name for party in config.secondaries}
    due = dict(names)
    while True:
        message = lines.receive(config.primary.name, ClassMeansKind.CLASS_MEANS_TURN, StarKind.DONE)
        if message.kind is StarKind.DONE:
            return len(names) - len(due)
        turn = ClassMeansTurn.from_message(message, due=due)
        what = dealt_sums.DealtFor(
            run=facts.run,
            secondary=turn.secondary,
            rows=facts.rows,
            bins=bins_of(config),
            numbers=turn.numbers,
        )
        dealing, seed = dealt_sums.deal(what)
        lines.send(ClassMeansSeed(seed=seed, what=what).to_message(), due.pop(turn.secondary))
        lines.send(
            ClassMeansDealing(shifts=dealing.shifts, correction=dealing.correction).to_message(),
            config.primary.name,
        )
