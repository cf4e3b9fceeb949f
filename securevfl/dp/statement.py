"""What a guarantee is about, in words that a privacy officer can sign."""

from typing import assert_never

from securevfl.dp.privacy import Privacy


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
    if privacy.encoder == "frozen" and privacy.unit != "linked-row":
        cap = privacy.links_per_record
        what += f" (each record linked to at most {cap} row{'s' if cap != 1 else ''})"
    return what
