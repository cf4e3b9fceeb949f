"""Who learns what while linking: the statements that logs, reports and the threat model share."""

from collections.abc import Mapping
from typing import Final

from securevfl.config.federation import FederationConfig
from securevfl.config.rules import keys_are_numbers

_SHOWN: Final = {
    "primary": "nothing of a secondary's records",
    "secondary": "the primary's keys, and their mean and deviation",
}
_CODES: Final = {
    "primary": "nothing of a secondary's records",
    "secondary": "for each primary row, which of its own records are nearest, in order and without "
    "distances: roughly where the row lies among its own records",
    "coordinator": "the codes of all keys: every Hamming distance between any two rows; which keys "
    "are equal and how often; the order and spacing of numbers up to an affine map; with a few "
    "known rows, much more. Without the linkage secret it cannot encode guesses",
}
_SHARES: Final = {
    "primary": "uniformly random numbers, and how many records each secondary has",
    "secondary": "uniformly random numbers; for each primary row, which of its own records are "
    "nearest, in order and without distances",
    "coordinator": "the distance of every primary row to every record (with linkage.cell: to those "
    "it is compared with), rounded to 16 bits: both tables' shape up to rotation and shift, and "
    "with a few known rows all keys",
    "dealer": "how many rows and records there are",
}
_PAILLIER: Final = {
    "primary": "numbers masked to within 2^-40, and how many records each secondary has",
    "secondary": "ciphertexts; for each primary row, which of its own records are nearest, in "
    "order and without distances",
    "coordinator": _SHARES["coordinator"],
}
_CELLS: Final = {
    "primary": "for the rows of each grid cell, how many of a secondary's records they are "
    "compared with, first in the nearest cells, then within reach: how dense records are there, "
    "and roughly how far the K-th is",
    "secondary": "which of its records are near to cells that hold rows, and how many rows",
    "coordinator": "the grid cell of every row and record under a shift that it does not know: a "
    "map of both tables, to within a cell's width",
    "dealer": "how many rows and records each block of neighbouring cells has",
}
_CELLS_CAPPED: Final = {
    **_CELLS,
    "primary": "for each grid cell that holds a secondary's records, how many these are and which "
    "of its own rows are near: roughly where the records lie",
    "secondary": "how many rows are near to the records of each of its cells",
}
_BY_PROTECTION: Final[Mapping[str, Mapping[str, str]]] = {
    "none": _SHOWN,
    "bloom": _CODES,
    "shares": _SHARES,
    "paillier": _PAILLIER,
}


def reveals_of(config: FederationConfig, role: str) -> list[str]:
    """Return what a party of that role learns from linking, one sentence each."""
    learned = [_BY_PROTECTION[config.linkage.protection][role]]
    if config.linkage.cell is not None:
        # Under a cap the records seek rows, and blocks follow the cells of the records.
        capped = config.privacy.links_per_record is not None
        learned.append((_CELLS_CAPPED if capped else _CELLS)[role])
    if config.family.needs_similarities(config.model) and role == "primary":
        learned.append(
            "for each of its rows and each secondary, K noised similarities in falling order, "
            "without record numbers"
        )
    return learned


def channels(config: FederationConfig) -> list[dict[str, str]]:
    """Return every way in which a party learns something, and what covers it.

    docs/privacy.md, section 1, says the same in words.
    """
    privacy, noised = config.privacy, config.privacy.mechanism != "none"
    frozen, private = privacy.encoder == "frozen", privacy.encoder == "dp-trained"
    averaging = 0 if frozen else config.model.average_positions_every
    alone = len(config.secondaries) == 1
    helpers = [("the", party.role) for party in config.parties if party.is_helper]
    similarities = (
        "similarities",
        "the primary: K of them for each row and secondary, noised once, in falling order",
        "heuristic: tau bounds one greedy attacker, where distances are whole numbers; not DP",
    )
    if not config.family.needs_similarities(config.model):
        similarities = ("similarities", "no one: the family reads none", "nothing is sent")
    shown = keys_are_numbers(config) and config.linkage.ranges is None
    rows = [
        (
            "aggregates",
            "the primary: one noised average over secondaries for every row and release"
            + ("; with one secondary nothing hides it but the noise" if alone else ""),
            f"covered by epsilon, unit {privacy.unit}" if noised else "not covered: no noise",
        ),
        (
            "gradients",
            "no one: bottom models are frozen"
            if frozen
            else "every active secondary: the gradient of the aggregate, from which labels can "
            "be inferred",
            "nothing is sent" if frozen else "not covered",
        ),
        (
            "positional-encoding averaging",
            "every party: the mean of the encodings' weights" if averaging else "no one",
            "nothing is sent"
            if not averaging
            else "covered by epsilon: every update of the weights is noised"
            if private
            else "heuristic: a secure mean without noise",
        ),
        (
            "linkage",
            "; ".join(
                f"{article} {role}: {', '.join(reveals_of(config, role))}"
                for article, role in (("the", "primary"), ("every", "secondary"), *helpers)
            ),
            f'not covered by epsilon: protection = "{config.linkage.protection}"',
        ),
        similarities,
        (
            "scaling statistics",
            "every secondary: mean and deviation of the primary's keys" if shown else "no one",
            "not covered" if shown else "nothing is sent",
        ),
        (
            "row counts, batch membership, timing and message sizes",
            "every secondary, and the primary",
            "not covered",
        ),
        (
            "publication of the model",
            "whoever gets the primary's model: a function of the aggregates and of the primary's "
            "own data",
            "secondaries' records are covered as the aggregates are; the primary's are not",
        ),
    ]
    rows += _pretraining_channels(config)
    if config.encoder and config.encoder.fitting:
        rows.append(
            (
                "fitting of encoders",
                "no one: each secondary's noised statistics stay with it, and speak through the "
                "aggregates",
                f"covered by epsilon, unit {privacy.unit}" if noised else "not covered: no noise",
            )
        )
    return [
        {"channel": channel, "reveals": reveals, "guarantee": guarantee}
        for channel, reveals, guarantee in rows
    ]


def _pretraining_channels(config: FederationConfig) -> list[tuple[str, str, str]]:
    steps, settings = config.family.pretraining, config.pretraining
    alone = len(config.secondaries) == 1
    rows = []
    if "cross" in steps:
        seen = "the average of the secondaries' unit vectors"
        if alone or settings.exchange == "plain":
            seen = "each secondary's unit vectors"
        sent = {
            "plain": "not covered",
            "iso": "heuristic: ISO noise promises nothing",
            "gaussian": f"covered by epsilon = {settings.epsilon} of its own ledger; any one row "
            f"of the primary",
        }
        rows += [
            ("pretraining, to the primary", f"{seen} for every aligned row", "not covered"),
            (
                "pretraining, from the primary",
                "every secondary: the primary's unit vectors of every aligned row, made without "
                "labels; and which rows are held out",
                sent[settings.primary_sends],
            ),
        ]
    if "aggregate" in steps:
        rows.append(
            (
                "pretraining, aggregation of models",
                "every party: the weighted mean of all parties' local top encoders and heads; "
                "the primary: the sum of the weights, which are counts of records",
                "not covered: with one secondary the mean gives its weights away"
                if alone
                else "heuristic: a secure mean without noise",
            )
        )
    return rows
