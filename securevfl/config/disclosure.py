"""Every way in which a party learns something, and what covers it: part of every run folder.

A channel is one function in :data:`CHANNELS`. It speaks of one federation file, and returns None
where that has no such channel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.linkage.stage.linking import reveals_of

_NOTHING: Final = "nothing is sent"
_NOT_COVERED: Final = "not covered"
_ISO: Final = "heuristic: ISO noise promises nothing, and its size shows"


@dataclass(frozen=True, slots=True)
class Channel:
    """One way in which a party learns something."""

    channel: str
    """What it is called."""

    reveals: str
    """Who learns what."""

    guarantee: str
    """What covers it, if anything does."""

    whose: Literal["secondaries", "primary", "all"]
    """Whose rows, records or weights are learned about."""


def leaves_secondary(channel: Mapping[str, str]) -> bool:
    """Return whether a channel of :func:`channels` reveals anything of a secondary."""
    return channel["whose"] != "primary" and channel["guarantee"] != _NOTHING


def channels(config: FederationConfig) -> list[dict[str, str]]:
    """Return every channel of a federation, as run folders and reports show them.

    docs/privacy.md, section 1, says the same in words.
    """
    found = (describe(config) for describe in CHANNELS)
    return [asdict(channel) for channel in found if channel is not None]


def aggregates(config: FederationConfig) -> Channel:
    """Describe what rounds release."""
    reveals = "the primary: one noised average over secondaries for every row and release"
    if _alone(config):
        reveals += "; with one secondary nothing hides it but the noise"
    return Channel("aggregates", reveals, _covered_by_noise(config), whose="secondaries")


def sparse_masks(config: FederationConfig) -> Channel | None:
    """Describe what colluding parties see where masks are shared with a few."""
    degree = config.privacy.mask_degree
    if degree is None:
        return None
    return Channel(
        "masks",
        f"the primary with up to {degree - 1} secondaries that help it: of the others their sum "
        f"alone; with {degree}, where they are all that one shares masks with in a round: that "
        f"one's term by itself",
        f"masks that each secondary shares with {degree} of {len(config.secondaries) - 1} others; "
        f"from {degree} helpers on (privacy.colluding = {config.privacy.colluding}) "
        f"{'nothing' if config.privacy.mechanism == 'none' else 'its own noise alone'} covers a "
        f"single term",
        whose="secondaries",
    )


def presence(config: FederationConfig) -> Channel | None:
    """Describe what becomes visible where a run continues without a lost secondary."""
    if not config.continues_on_loss:
        return None
    least, all_of_them = config.least_in_training, len(config.secondaries)
    return Channel(
        "who takes part",
        f"every party: which secondaries are there, from epoch to epoch. The primary may leave out "
        f"any, lost or not, down to {least} of {all_of_them}, and then learns what the others' sum "
        f"is without these: of rows that it asks for before and after, the difference is theirs",
        _covered_by_noise(config),
        whose="secondaries",
    )


def gradients(config: FederationConfig) -> Channel:
    """Describe what rounds return."""
    if config.privacy.encoder == "frozen":
        return Channel("gradients", "no one: bottom models are frozen", _NOTHING, whose="primary")
    if config.family.assisted:
        return Channel(
            "gradients", "no one: secondaries learn from residuals", _NOTHING, whose="primary"
        )
    reveals = "every active secondary: the gradient of the aggregate, from which labels can be "
    if config.training.iso_gradients:
        reveals += "inferred, behind ISO noise, and the length of the longest in the batch"
        return Channel(
            "gradients", reveals, f"{_ISO} how badly the worst row is predicted", whose="primary"
        )
    return Channel("gradients", f"{reveals}inferred", _NOT_COVERED, whose="primary")


def residuals(config: FederationConfig) -> Channel | None:
    """Describe what assisted boosting sends."""
    if not config.family.assisted:
        return None
    epsilon = config.label_epsilon
    if epsilon is not None:
        return Channel(
            "residuals",
            f"every secondary: what is left to explain of labels that are drawn once a run, up to "
            f"{config.epochs} times; each round's step, and when a round brings nothing",
            f"covered by label_epsilon = {epsilon:g}, against all secondaries together",
            whose="primary",
        )
    return Channel(
        "residuals",
        f"every secondary: what is left to explain of every training row's label, up to "
        f"{config.epochs} times, from which labels can be read; each round's step, and which round "
        f"was the best",
        _NOT_COVERED,
        whose="primary",
    )


def positions(config: FederationConfig) -> Channel:
    """Describe averages of positional encodings."""
    name, encoder = "positional-encoding averaging", config.privacy.encoder
    if encoder == "frozen" or not config.model.average_positions_every:
        return Channel(name, "no one", _NOTHING, whose="all")
    covered = "heuristic: a secure mean without noise"
    if encoder == "dp-trained":
        covered = "covered by epsilon: every update of the weights is noised"
    return Channel(name, "every party: the mean of the encodings' weights", covered, whose="all")


def linkage(config: FederationConfig) -> Channel:
    """Describe what linking the keys shows."""
    spec = link_spec(config)
    helpers = [("the", role) for role in spec.roles.helpers]
    return Channel(
        "linkage",
        "; ".join(
            f"{article} {role}: {', '.join(reveals_of(spec, role))}"
            for article, role in (("the", "primary"), ("every", "secondary"), *helpers)
        ),
        f'not covered by epsilon: protection = "{config.linkage.protection}"',
        whose="all",
    )


def aligned_rows(config: FederationConfig) -> Channel | None:
    """Describe who learns which rows are linked."""
    if not link_spec(config).tells_rows:
        return None
    return Channel(
        "aligned rows",
        "the primary: for each row and each secondary, whether the row has a link there, so who of "
        "its own is known to that secondary; every secondary: in batches, which rows have one at "
        "all secondaries",
        _NOT_COVERED,
        whose="all",
    )


def similarities(config: FederationConfig) -> Channel:
    """Describe the similarities that some families read."""
    if link_spec(config).similarities is None:
        return Channel(
            "similarities", "no one: the family reads none", _NOTHING, whose="secondaries"
        )
    return Channel(
        "similarities",
        "the primary: K of them for each row and secondary, noised once, in falling order",
        "heuristic: tau bounds one greedy attacker, where distances are whole numbers; not DP",
        whose="secondaries",
    )


def scaling_statistics(config: FederationConfig) -> Channel:
    """Describe the statistics by which all parties scale keys."""
    keys = link_spec(config).keys
    if not keys.are_numbers or keys.ranges is not None:
        return Channel("scaling statistics", "no one", _NOTHING, whose="primary")
    return Channel(
        "scaling statistics",
        "every secondary: mean and deviation of the primary's keys",
        _NOT_COVERED,
        whose="primary",
    )


def counts(_config: FederationConfig) -> Channel:
    """Describe what sizes and times show."""
    return Channel(
        "row counts, batch membership, timing and message sizes",
        "every secondary, and the primary",
        _NOT_COVERED,
        whose="all",
    )


def publication(_config: FederationConfig) -> Channel:
    """Describe what a published model shows."""
    return Channel(
        "publication of the model",
        "every recipient of the primary's model: a function of the aggregates and of the "
        "primary's own data",
        "secondaries' records are covered as the aggregates are; the primary's are not",
        whose="all",
    )


def pretraining_to_the_primary(config: FederationConfig) -> Channel | None:
    """Describe what secondaries send in cross-party pretraining."""
    if "cross" not in config.family.pretraining:
        return None
    seen = "the average of the secondaries' unit vectors"
    if _alone(config) or config.pretraining.exchange == "plain":
        seen = "each secondary's unit vectors"
    return Channel(
        "pretraining, to the primary",
        f"{seen} for every aligned row",
        _NOT_COVERED,
        whose="secondaries",
    )


def pretraining_from_the_primary(config: FederationConfig) -> Channel | None:
    """Describe what the primary sends in cross-party pretraining."""
    if "cross" not in config.family.pretraining:
        return None
    settings = config.pretraining
    seen, guarantee = "unit vectors of every aligned row", _NOT_COVERED
    if settings.primary_sends == "gaussian":
        guarantee = (
            f"covered by epsilon = {settings.epsilon} of its own ledger; any one row of the primary"
        )
    elif settings.iso_projections:
        seen = "projections of every aligned row behind ISO noise, the longest's length in a batch"
        guarantee = f"{_ISO} that length"
    return Channel(
        "pretraining, from the primary",
        f"every secondary: the primary's {seen}, made without labels; and which rows are held out",
        guarantee,
        whose="primary",
    )


def pretraining_aggregation(config: FederationConfig) -> Channel | None:
    """Describe means of models in pretraining."""
    if "aggregate" not in config.family.pretraining:
        return None
    reveals = "every party: the mean of all parties' local top encoders and heads"
    if config.pretraining.weights == "records":
        reveals += ", weighted by records; the primary: how many records all have together"
    guarantee = "heuristic: a secure mean without noise"
    if _alone(config):
        guarantee = "not covered: with one secondary the mean gives its weights away"
    if config.pretraining.iso_weights:
        reveals += "; the primary's part is behind ISO noise, but for batch norms' statistics"
        guarantee += f"; of the primary's weights {_ISO} each layer's longest row"
    return Channel("pretraining, aggregation of models", reveals, guarantee, whose="all")


def fitting(config: FederationConfig) -> Channel | None:
    """Describe the fitting of frozen encoders."""
    if config.encoder is None or config.encoder.fitting is None:
        return None
    if config.deals_votes:
        return Channel(
            "fitting of encoders",
            "the primary: each secondary's sum of records for each class, behind that secondary's "
            "noise; the dealer, which must collude with no party: sizes",
            _covered_by_noise(config),
            whose="secondaries",
        )
    return Channel(
        "fitting of encoders",
        "no one: each secondary's noised statistics stay with it, and speak through the aggregates",
        _covered_by_noise(config),
        whose="secondaries",
    )


def labels_of_votes(config: FederationConfig) -> Channel | None:
    """Describe what secondaries learn of the labels that class means are fitted to."""
    encoder, name = config.encoder, "labels that class means are fitted to"
    if encoder is None or encoder.labels is None:
        return None
    if encoder.labels == "shown":
        reveals = "every secondary: each training row's label, and which rows train"
        return Channel(name, reveals, _NOT_COVERED, whose="primary")
    covered = f"covered by label_epsilon = {encoder.label_epsilon:g}, any one row's label, against"
    if encoder.labels == "randomised":
        return Channel(
            name,
            "every secondary: each training row's label by randomised response, the same draw for "
            "all; which rows train",
            f"{covered} all secondaries together; which rows train is not covered",
            whose="primary",
        )
    return Channel(
        name,
        "each secondary: the sum of its own records for each class, behind noise of its own and of "
        "the primary's",
        f"{covered} one secondary that follows the protocol; the dealer together with a secondary "
        f"sees labels",
        whose="primary",
    )


CHANNELS: Final[Sequence[Callable[[FederationConfig], Channel | None]]] = (
    aggregates,
    sparse_masks,
    presence,
    gradients,
    residuals,
    positions,
    linkage,
    aligned_rows,
    similarities,
    scaling_statistics,
    counts,
    publication,
    pretraining_to_the_primary,
    pretraining_from_the_primary,
    pretraining_aggregation,
    fitting,
    labels_of_votes,
)
"""In the order in which reports show them."""


def _alone(config: FederationConfig) -> bool:
    return len(config.secondaries) == 1


def _covered_by_noise(config: FederationConfig) -> str:
    if config.privacy.mechanism == "none":
        return "not covered: no noise"
    return f"covered by epsilon, unit {config.privacy.unit}"
