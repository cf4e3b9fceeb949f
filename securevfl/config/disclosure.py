"""Every way in which a party learns something, and what covers it: part of every run folder.

Each function below yields the channels of one part of a run that a federation file has. Each
field of each message names the channel that it belongs to
(:data:`securevfl.transport.message.Cover`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.sections import TrainingSettings
from securevfl.config.stage_policy import NOT_COVERED, Channel, policies
from securevfl.core.errors import PrivacyError
from securevfl.linkage.stage.linkage_parts import PROTECTIONS, reveals_of
from securevfl.transport.message import Cover, TypedMessage

_NOTHING: Final = "nothing is sent"
KEPT_STATISTICS: Final = (
    "no one: each secondary's noised statistics stay with it, and speak through the aggregates"
)
"""Who learns what of encoders that secondaries fit by themselves."""


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
    for part in (_rounds, _returned_channels, _linkage, _always, _encoders):
        yield from part(config)
    for policy in policies(config).values():
        yield from policy.channels(config)


def require_covered_channels(config: FederationConfig) -> None:
    """Refuse a run that promises an epsilon and has a channel of records which it does not cover.

    Raises:
        PrivacyError: Saying which setting opens it, what it shows, and what to write instead.
    """
    privacy = config.privacy
    if privacy.mechanism == "none" or privacy.accounting == "as-published":
        return
    config.family.require_separate_rows(config.model)
    for channel in _all(config):
        shows = asdict(channel)
        if leaves_secondary(shows) and coverage(shows) == NOT_COVERED and not channel.stated:
            raise PrivacyError(
                channel.refusal or f"{channel.channel}: {channel.reveals}; no epsilon covers this"
            )


def _rounds(config: FederationConfig) -> Iterator[Channel]:
    """Yield what rounds release of secondaries, and to whom."""
    covered, all_of_them = covered_by_noise(config), len(config.secondaries)
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


def _returned_channels(config: FederationConfig) -> Iterator[Channel]:
    """Yield what rounds return to secondaries: gradients, averages of weights."""
    regime = config.regime
    if not regime.learns:
        yield Channel(
            "gradients", "no one: bottom models are frozen", _NOTHING, "primary", "nobody"
        )
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
    covered = regime.weights_guarantee if config.model.average_positions_every else _NOTHING
    reveals = "every party: the mean of the encodings' weights"
    if covered == _NOTHING:
        reveals = "no one"
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
    return "", NOT_COVERED


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
        covered_by_noise(config) if counted else _NOTHING,
        "secondaries",
        "primary" if counted else "nobody",
    )
    if spec.tells_rows:
        yield Channel(
            "aligned rows",
            "the primary: for each row and each secondary, whether the row has a link there, so "
            "who of its own is known to that secondary; every secondary: in batches, which rows "
            "have one at all secondaries",
            NOT_COVERED,
            "all",
            "all",
            refusal='training.rows: "aligned" shows the primary which rows have a record at every '
            "secondary, which no noise covers, so epsilon would not hold for one record; set it "
            'to "all"'
            if config.training.rows == "aligned"
            else _why_rows_stay_secret(config),
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
        yield Channel("scaling statistics", reveals, NOT_COVERED, "primary", "secondaries")
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
        reveals, covered = f"{to}: with how many records each row is compared", NOT_COVERED
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


def _why_rows_stay_secret(config: FederationConfig) -> str:
    """Return what refuses a promise where a stage has rows aligned."""
    reasons = (policy.why_rows_stay_secret(config) for policy in policies(config).values())
    return next((reason for reason in reasons if reason is not None), "")


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
        NOT_COVERED,
        "all",
        "all",
        stated=True,
    )
    yield Channel(
        "failures",
        "every party: who failed and why, in one sentence without records; so also that a table "
        "can't be read or linked",
        NOT_COVERED,
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


def _encoders(config: FederationConfig) -> Iterator[Channel]:
    """Yield what the fitting of frozen encoders to records alone shows."""
    if config.fitting is not None and not config.encoder_reads_labels:
        yield Channel(
            "fitting of encoders",
            KEPT_STATISTICS,
            covered_by_noise(config),
            "secondaries",
            "primary",
        )


def covered_by_noise(config: FederationConfig) -> str:
    """Return what covers what leaves a secondary behind the noise of rounds."""
    if config.privacy.mechanism == "none":
        return "not covered: no noise"
    return f"covered by epsilon, unit {config.privacy.unit}"


def _why_noise_is_not_enough(config: FederationConfig) -> str:
    """Return why noise does not cover what rounds release, and what to write; empty if it does."""
    regime = config.regime
    for policy in policies(config).values():
        if (reason := policy.why_noise_fails(config)) is not None:
            return reason
    if not regime.caps_records:
        return ""
    for party in config.secondaries:
        if party.scaling in ("standard", "clamped"):
            return (
                f'party {party.name!r}: scaling = "{party.scaling}" fits statistics to the table, '
                f"so one record moves every row and a {regime.name} encoder's epsilon would not "
                f'hold; use scaling = "bounds" with declared bounds, or "none"'
            )
    return ""
