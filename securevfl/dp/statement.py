"""What a guarantee is about, in words that a privacy officer can sign."""

from typing import Final, assert_never

from securevfl.dp.privacy import Privacy

NO_PROMISE: Final = (
    "No noise is added: what the primary learns from the averages is not bounded; secret sharing "
    "hides the terms of each average, and nothing else protects."
)


def unit_in_words(privacy: Privacy, *, links: int) -> str:
    """Return the unit's half of a sentence: "... tell whether {this} with epsilon = ..."."""
    match privacy.unit:
        case "secondary-record":
            what = "any one record is in any one secondary's table"
        case "entity":
            what = "any one entity is in the secondaries' tables, one record in each,"
        case "linked-row":
            what = (
                f"any one of the primary's rows is linked to secondary records (up to {links} at "
                f"each secondary)"
            )
        case _:
            assert_never(privacy.unit)
    if privacy.encoder != "trained" and privacy.unit != "linked-row":
        cap = privacy.links_per_record
        what += f" (each record linked to at most {cap} row{'s' if cap != 1 else ''})"
    return what


def promise_in_words(
    privacy: Privacy, *, links: int, parties: int, epsilon: float, claimed: float, fitted: bool
) -> str:
    """Return a run's guarantee in one plain sentence.

    Args:
        privacy: What was asked for; its mechanism adds noise.
        links: ``K``, links of a row at each secondary.
        parties: Secondaries of the federation.
        epsilon: What sound accounting gives.
        claimed: What the papers' formula would claim.
        fitted: Whether encoders were fitted to tables beforehand.
    """
    what = unit_in_words(privacy, links=links)
    if privacy.accounting == "as-published":
        return (
            f"The papers' formula claims epsilon = {claimed:.4g} at delta = {privacy.delta:g}; "
            f"that is not a guarantee: {what}, sound accounting gives epsilon = {epsilon:.4g}."
        )
    against = "the primary"
    if privacy.colluding:
        against += f", helped by any {privacy.colluding} of the {parties} secondaries,"
    released = "averages and the fitting of the encoders" if fitted else "averages"
    if privacy.encoder == "dp-trained":
        released = "averages and updates of the encoders"
    return (
        f"All {released} together let {against} tell whether {what} with "
        f"epsilon = {epsilon:.4g} at delta = {privacy.delta:g}."
    )
