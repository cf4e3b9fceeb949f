"""Every way in which a party learns something, and what covers it: part of every run folder."""

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.linking.protections.table import reveals_of


def channels(config: FederationConfig) -> list[dict[str, str]]:
    """Return every way in which a party learns something, and what covers it.

    docs/privacy.md, section 1, says the same in words.
    """
    spec = link_spec(config)
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
    if spec.similarities is None:
        similarities = ("similarities", "no one: the family reads none", "nothing is sent")
    shown = spec.keys.are_numbers and spec.keys.ranges is None
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
                f"{article} {role}: {', '.join(reveals_of(spec, role))}"
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
