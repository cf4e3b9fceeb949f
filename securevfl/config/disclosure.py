"""Every way in which a party learns something, and what covers it: part of every run folder.

Each function below yields the channels of one part of a run that a federation file has. Each
field of each message names the channel that it belongs to
(:data:`securevfl.transport.message.Cover`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.sections import TrainingSettings
from securevfl.core.errors import PrivacyError
from securevfl.linkage.stage.linkage_parts import PROTECTIONS, reveals_of
from securevfl.transport.message import Cover, TypedMessage

_NOTHING: Final = "nothing is sent"
_NOT_COVERED: Final = "not covered"
_ISO: Final = "heuristic: ISO noise promises nothing, and its size shows"


@dataclass(frozen=True, slots=True)
class Channel:
    """One way in which a party learns something."""

    channel: Cover
    """Its name, by which fields of messages refer to it."""

    reveals: str
    """Who learns what."""

    guarantee: str
    """Statement of the promise that covers it, if any does."""

    whose: Literal["secondaries", "primary", "all"]
    """Whose rows, records or weights are learned about."""

    to: Literal["primary", "secondaries", "all", "recipients", "nobody"]
    """Who learns it; ``recipients`` are those who get the model."""

    stated: bool = False
    """True for a channel that no epsilon covers and no promise refuses; the promise's statement and
    docs/privacy.md name it."""

    refusal: str = ""
    """Sentence that refuses a promise with this channel: the setting, what it shows, and what to
    write instead."""


def coverage(channel: Mapping[str, str]) -> str:
    """Return whether a guarantee covers a channel of :func:`channels`, in a word or two."""
    guarantee = channel["guarantee"]
    if guarantee == _NOTHING:
        return guarantee
    if guarantee.startswith("secondaries' records"):
        return "partly covered"
    return "covered" if guarantee.startswith(("covered", "masks")) else "not covered"


def status(channel: Mapping[str, str], *, measured: bool) -> str:
    """Return whether a channel of :func:`channels` is covered, or else measured.

    Args:
        channel: Of the run.
        measured: Whether an attack has tried it.
    """
    mark = coverage(channel)
    if mark == "covered":
        return "covered by a guarantee"
    return mark if mark == _NOTHING else f"{mark}, {'measured' if measured else 'not measured'}"


def leaves_secondary(channel: Mapping[str, str]) -> bool:
    """Return whether a channel of :func:`channels` reveals anything of a secondary."""
    return channel["whose"] != "primary" and channel["guarantee"] != _NOTHING


def channels(config: FederationConfig) -> list[dict[str, str]]:
    """Return every channel of a federation, as run folders and reports show them.

    docs/privacy.md, section 1, says the same in words.
    """
    own = ("stated", "refusal")
    return [
        {name: value for name, value in asdict(channel).items() if name not in own}
        for channel in _all(config)
    ]


def _all(config: FederationConfig) -> Iterator[Channel]:
    for part in (_rounds, _returned_channels, _linkage, _always, _pretraining, _encoders):
        yield from part(config)


def require_covered_channels(config: FederationConfig) -> None:
    """Refuse a run that promises an epsilon and has a channel of records which it does not cover.

    Raises:
        PrivacyError: Saying which setting opens it, what it shows, and what to write instead.
    """
    privacy = config.privacy
    # Scores of assisted boosting have no noise, so nothing could be shown as published.
    if privacy.mechanism == "none" or (
        privacy.accounting == "as-published" and not config.family.assisted
    ):
        return
    config.family.require_separate_rows(config.model)
    for channel in _all(config):
        shows = asdict(channel)
        if leaves_secondary(shows) and coverage(shows) == _NOT_COVERED and not channel.stated:
            raise PrivacyError(
                channel.refusal or f"{channel.channel}: {channel.reveals}; no epsilon covers this"
            )


def _rounds(config: FederationConfig) -> Iterator[Channel]:
    """Yield what rounds release of secondaries, and to whom."""
    covered, all_of_them = _covered_by_noise(config), len(config.secondaries)
    reveals, refusal = "the primary: one noised average over secondaries for every row", ""
    reveals += " and release"
    if all_of_them == 1:
        reveals += "; with one secondary nothing hides it but the noise"
    if config.privacy.mechanism != "none":
        refusal = _why_noise_is_not_enough(config)
    yield Channel(
        "aggregates",
        reveals,
        "not covered: records move more than noise hides" if refusal else covered,
        "secondaries",
        "primary",
        refusal=refusal,
    )
    if (degree := config.privacy.mask_degree) is not None:
        noise = "nothing" if config.privacy.mechanism == "none" else "its own noise alone"
        yield Channel(
            "masks",
            f"the primary with up to {degree - 1} secondaries that help it: of the others their "
            f"sum alone; with {degree}, where they are all that one shares masks with in a round: "
            f"that one's term by itself",
            f"masks that each secondary shares with {degree} of {all_of_them - 1} others; from "
            f"{degree} helpers on (privacy.colluding = {config.privacy.colluding}) {noise} covers "
            f"a single term",
            "secondaries",
            "primary",
        )
    if config.continues_on_loss:
        yield Channel(
            "who takes part",
            f"every party: which secondaries are there, from epoch to epoch. The primary may leave "
            f"out any, lost or not, down to {config.least_in_training} of {all_of_them}, and then "
            f"learns what the others' sum is without these: of rows that it asks for before and "
            f"after, the difference is theirs",
            covered,
            "secondaries",
            "all",
        )


def _returned_channels(config: FederationConfig) -> Iterator[Channel]:
    """Yield what rounds return to secondaries: gradients, residuals, averages of weights."""
    encoder, assisted = config.privacy.encoder, config.family.assisted
    if encoder == "frozen" or assisted:
        why = (
            "bottom models are frozen"
            if encoder == "frozen"
            else "secondaries learn from residuals"
        )
        yield Channel("gradients", f"no one: {why}", _NOTHING, "primary", "nobody")
    else:
        reveals, covered = _gradients(config.training)
        yield Channel(
            "gradients",
            f"every active secondary: the gradient of the aggregate, from which labels can be "
            f"inferred{reveals}",
            covered,
            "primary",
            "secondaries",
        )
    if assisted and config.label_epsilon is not None:
        yield Channel(
            "residuals",
            f"every secondary: what is left to explain of labels that are drawn once a run, up to "
            f"{config.epochs} times; each round's step, and when a round brings nothing",
            f"covered by label_epsilon = {config.label_epsilon:g}, against all secondaries "
            f"together",
            "primary",
            "secondaries",
        )
    elif assisted:
        yield Channel(
            "residuals",
            f"every secondary: what is left to explain of every training row's label, up to "
            f"{config.epochs} times, from which labels can be read; each round's step, and which "
            f"round was the best",
            _NOT_COVERED,
            "primary",
            "secondaries",
        )
    reveals, covered = "no one", _NOTHING
    if encoder != "frozen" and config.model.average_positions_every:
        reveals = "every party: the mean of the encodings' weights"
        covered = "heuristic: a secure mean without noise"
        if encoder == "dp-trained":
            covered = "covered by epsilon: every update of the weights is noised"
    yield Channel(
        "positional-encoding averaging",
        reveals,
        covered,
        "all",
        "nobody" if covered == _NOTHING else "all",
        refusal="model.average_positions_every: positional encodings are trained on private "
        "records, and their average is not noised, so epsilon would not cover it; set it to 0 or "
        'use privacy.encoder = "dp-trained", whose weights are covered (or, '
        'without any guarantee, privacy.accounting = "as-published" or mechanism = "none")',
    )


def _gradients(training: TrainingSettings) -> tuple[str, str]:
    """Return what defences of labels add to what gradients reveal, and what covers these."""
    if training.label_epsilon is not None:
        return ", as they were drawn once a run", (
            f"covered by label_epsilon = {training.label_epsilon:g}, any one training row's label, "
            f"against all secondaries together"
        )
    if training.iso_gradients:
        return (
            ", behind ISO noise, and the length of the longest in the batch",
            f"{_ISO} how badly the worst row is predicted",
        )
    if training.marvell:
        return ", behind Marvell's noise", "heuristic: Marvell's noise promises nothing"
    if training.clip_gradients is not None:
        return ", clipped", "heuristic: a clip hides lengths, not directions, and promises nothing"
    return "", _NOT_COVERED


def _linkage(config: FederationConfig) -> Iterator[Channel]:
    """Yield what linking shows."""
    spec = link_spec(config)
    roles = {"primary": "the", "secondary": "every", **dict.fromkeys(spec.roles.helpers, "the")}
    yield Channel(
        "linkage",
        "; ".join(
            f"{party_name} {role}: {', '.join(reveals_of(spec, role))}"
            for role, party_name in roles.items()
        ),
        f'not covered by epsilon: protection = "{config.linkage.protection}"',
        "all",
        "all",
        stated=True,
    )
    yield from _counts(config)
    counted = config.privacy.bounds_linked_rows
    yield Channel(
        "number of linked rows",
        "the primary: of each secondary, how many rows have a record there"
        if counted
        else "no one: a record without privacy.links_per_record might link every row",
        _covered_by_noise(config) if counted else _NOTHING,
        "secondaries",
        "primary" if counted else "nobody",
    )
    if spec.tells_rows:
        yield Channel(
            "aligned rows",
            "the primary: for each row and each secondary, whether the row has a link there, so "
            "who of its own is known to that secondary; every secondary: in batches, which rows "
            "have one at all secondaries",
            _NOT_COVERED,
            "all",
            "all",
            refusal='training.rows: "aligned" shows the primary which rows have a record at every '
            "secondary, which no noise covers, so epsilon would not hold for one record; set it "
            'to "all"'
            if config.training.rows == "aligned"
            else _exchange_error(config, "averages of projections"),
        )
    reveals, covered = "no one: the family reads none", _NOTHING
    if spec.similarities is not None:
        reveals = (
            "the primary: up to K of them for each row and secondary, noised once, in falling "
            "order, so also how many records each row is linked to"
        )
        covered = (
            "heuristic: tau bounds one greedy attacker, where distances are whole numbers; not DP"
        )
    name = config.family.name
    yield Channel(
        "similarities",
        reveals,
        covered,
        "secondaries",
        "nobody" if covered == _NOTHING else "primary",
        refusal=f"model.family: {name!r} sends the primary similarities, of which a row without a "
        f"record has none, whatever the noise, so epsilon would not hold for one record; take "
        f'"avgsim", "top1sim" or "fet", or, without a promise, privacy.mechanism = "none" with '
        f"linkage.similarity_noise",
    )
    if spec.keys.are_numbers and spec.keys.ranges is None:
        reveals = "every secondary: mean and deviation of the primary's keys"
        yield Channel("scaling statistics", reveals, _NOT_COVERED, "primary", "secondaries")
    else:
        yield Channel("scaling statistics", "no one", _NOTHING, "primary", "nobody")


def _counts(config: FederationConfig) -> Iterator[Channel]:
    """Yield what linking shows of how many records there are, and whether they were there before.

    The protection's messages say what is sent.
    """
    linkage = config.linkage
    protection = PROTECTIONS[linkage.protection]
    messages, closed = protection.messages, protection.closed_channels(linkage.protection_settings)
    reveals, covered = "no one", _NOTHING
    if (to := _receivers(messages, "record counts")) and "record counts" not in closed:
        reveals = f"{to}: how many records, or different keys, each secondary has"
        covered = "not covered: who knows all records but one learns whether that one is there"
    yield Channel("record counts", reveals, covered, "secondaries", "all", stated=True)
    reveals, covered = "no one", _NOTHING
    to = _receivers(messages, "records near rows")
    if to and "records near rows" not in closed:
        reveals, covered = f"{to}: with how many records each row is compared", _NOT_COVERED
    yield Channel(
        "records near rows",
        reveals,
        covered,
        "secondaries",
        "nobody" if covered == _NOTHING else "primary",
        refusal="linkage.cell: shows the primary how many records lie near its rows, which no "
        "noise covers, so epsilon would not hold for one record; leave it out",
    )
    reveals, covered = "no one", _NOTHING
    if to := _receivers(messages, "kept links"):
        reveals = f"{to}: where links are kept, whether a table is the same as in an earlier run"
        covered = "not covered: tags under a key of each party's own"
    yield Channel("kept links", reveals, covered, "all", "all", stated=True)


def _receivers(messages: Sequence[type[TypedMessage]], channel: Cover) -> str:
    """Return who receives messages with fields of a channel; empty where there are none."""
    ways = [message.WAY.partition(" to ")[2] for message in messages if channel in message.COVERS]
    return ", ".join(dict.fromkeys(ways))


def _always(_config: FederationConfig) -> Iterator[Channel]:
    """Yield what every run shows, and every model that is published."""
    yield Channel(
        "sizes and times",
        "every secondary, and the primary: how many rows there are, which are in a batch, when "
        "messages come and how long they are",
        _NOT_COVERED,
        "all",
        "all",
        stated=True,
    )
    yield Channel(
        "failures",
        "every party: who failed and why, in one sentence without records; so also that a table "
        "can't be read or linked",
        _NOT_COVERED,
        "all",
        "all",
        stated=True,
    )
    yield Channel(
        "ledgers",
        "every party with a table: heads of the others' ledgers and how often something was "
        "charged, in other federations too",
        "not covered; no line depends on a record",
        "all",
        "all",
        stated=True,
    )
    yield Channel(
        "publication of the model",
        "every recipient of the primary's model: a function of the aggregates and of the "
        "primary's own data",
        "secondaries' records are covered as the aggregates are; the primary's are not",
        "all",
        "recipients",
    )


def _pretraining(config: FederationConfig) -> Iterator[Channel]:
    """Yield what pretraining exchanges."""
    settings, alone = config.pretraining, len(config.secondaries) == 1
    if "cross" in config.family.pretraining:
        each = alone or settings.exchange == "plain"
        seen = "each secondary's" if each else "the average of the secondaries'"
        yield Channel(
            "pretraining, to the primary",
            f"{seen} unit vectors for every aligned row",
            _NOT_COVERED,
            "secondaries",
            "primary",
            refusal=_exchange_error(config, "averages of projections"),
        )
        seen, covered = "unit vectors of every aligned row", _NOT_COVERED
        if settings.primary_sends == "gaussian":
            covered = (
                f"covered by epsilon = {settings.epsilon} of its own ledger; any one row of the "
                f"primary"
            )
        elif settings.iso_projections:
            seen = (
                "projections of every aligned row behind ISO noise, the longest's length in a batch"
            )
            covered = f"{_ISO} that length"
        yield Channel(
            "pretraining, from the primary",
            f"every secondary: the primary's {seen}, made without labels; and which rows are held "
            f"out",
            covered,
            "primary",
            "secondaries",
        )
    if "aggregate" in config.family.pretraining:
        reveals = "every party: the mean of all parties' local top encoders and heads"
        if settings.weights == "records":
            reveals += ", weighted by records; the primary: how many records all have together"
        covered = "heuristic: a secure mean without noise"
        if alone:
            covered = "not covered: with one secondary the mean gives its weights away"
        if settings.iso_weights:
            reveals += "; the primary's part is behind ISO noise, but for batch norms' statistics"
            covered += f"; of the primary's weights {_ISO} each layer's longest row"
        yield Channel(
            "pretraining, aggregation of models",
            reveals,
            covered,
            "all",
            "all",
            refusal=_exchange_error(config, "means of weights"),
        )


def _exchange_error(config: FederationConfig, what: str) -> str:
    return (
        f"model.family: {config.family.name!r} exchanges {what} in pretraining, which carry no "
        f'noise, so epsilon would not cover them; use family = "fedlocalssl", which exchanges '
        f'nothing, or mechanism = "none"'
    )


def _encoders(config: FederationConfig) -> Iterator[Channel]:
    """Yield what the fitting of frozen encoders shows, of records and of labels."""
    encoder = config.encoder
    name: Final = "labels that class means are fitted to"
    if encoder is None:
        return
    if config.fitting is not None:
        reveals = (
            "no one: each secondary's noised statistics stay with it, and speak through the "
            "aggregates"
        )
        if config.deals_class_sums:
            reveals = (
                "the primary: each secondary's sum of records for each class, behind that "
                "secondary's noise; the dealer, which must collude with no party: sizes"
            )
        yield Channel(
            "fitting of encoders", reveals, _covered_by_noise(config), "secondaries", "primary"
        )
    covered = f"covered by label_epsilon = {encoder.label_epsilon:g}, any one row's label, against"
    if encoder.labels == "plaintext":
        reveals = "every secondary: each training row's label, and which rows train"
        yield Channel(name, reveals, _NOT_COVERED, "primary", "secondaries")
    elif encoder.labels == "randomised":
        yield Channel(
            name,
            "every secondary: each training row's label by randomised response, the same draw for "
            "all; which rows train",
            f"{covered} all secondaries together; which rows train is not covered",
            "primary",
            "secondaries",
        )
    elif encoder.labels == "shares":
        yield Channel(
            name,
            "each secondary: the sum of its own records for each class, behind noise of its own "
            "and of the primary's",
            f"{covered} one secondary that follows the protocol; the dealer together with a "
            f"secondary sees labels",
            "primary",
            "secondaries",
        )


def _covered_by_noise(config: FederationConfig) -> str:
    if config.privacy.mechanism == "none":
        nopeek = "; heuristic: encoders learn to correlate less with records, promising nothing"
        return "not covered: no noise" + nopeek * bool(config.training.distance_correlation)
    return f"covered by epsilon, unit {config.privacy.unit}"


def _why_noise_is_not_enough(config: FederationConfig) -> str:
    """Return why noise does not cover what rounds release, and what to write; empty if it does."""
    encoder, name = config.privacy.encoder, config.family.name
    if config.family.assisted:
        return (
            f"model.family: {name!r} releases scores of models that are fitted to private records "
            f'without noise, so no epsilon would cover them; set privacy.mechanism = "none", or '
            f'take frozen encoders (family = "fet", privacy.encoder = "frozen")'
        )
    if encoder == "trained":
        return ""
    if config.family.pretraining:
        return (
            f"model.family: {name!r} pretrains encoders on private records without noise, so they "
            f"are not {encoder} in the sense of the promise; use encoder = "
            f'"trained", or "fedsplitnn"'
        )
    for party in config.secondaries:
        if party.scaling in ("standard", "clamped"):
            return (
                f'party {party.name!r}: scaling = "{party.scaling}" fits statistics to the table, '
                f"so one record moves every row and a {encoder} encoder's epsilon would not hold; "
                f'use scaling = "bounds" with declared bounds, or "none"'
            )
    return ""
