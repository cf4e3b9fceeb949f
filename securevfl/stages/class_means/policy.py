"""Class means as the federation file has them: rules, and what they show of records and labels."""

from collections.abc import Iterator
from typing import Final

from securevfl.config.disclosure import KEPT_STATISTICS, covered_by_noise
from securevfl.config.encoder import EncoderSettings
from securevfl.config.federation import FederationConfig
from securevfl.config.stage_policy import NOT_COVERED, Channel, StagePolicy
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp.labels import SMALLEST_EPSILON, LabelRelease

_LABELS: Final = "labels that class means are fitted to"


def encoder_of(config: FederationConfig) -> EncoderSettings:
    """Return the ``[encoder]`` table of a federation file whose encoders are class means.

    Raises:
        TypeError: If its encoders are others.
    """
    if config.encoder is None or config.encoder.method != "class-means":
        raise TypeError(f"encoders are class means, and not {config.encoder!r}")
    return config.encoder


def hides_labels(config: FederationConfig) -> bool:
    """Return whether labels stay at home, under masks of a dealer."""
    return encoder_of(config).labels == "shares"


def dealer_of(config: FederationConfig) -> str:
    """Return the name of the party that deals masks between processes.

    Raises:
        ConfigError: If there is none.
    """
    dealer = config.helper("dealer")
    if dealer is None:
        raise ConfigError(
            'encoder.labels: "shares" needs a party that holds no table and deals masks: add '
            '[[party]] name = "dealer", role = "dealer"; or take "randomised"'
        )
    return dealer.name


def labels_released(config: FederationConfig) -> LabelRelease:
    """Return the release of the labels that encoders are fitted to."""
    encoder = encoder_of(config)
    hidden = hides_labels(config)
    return LabelRelease(
        mechanism=encoder.labels or "plaintext",
        epsilon=None if encoder.labels == "plaintext" else encoder.label_epsilon,
        delta=config.privacy.delta if hidden else 0.0,
        parties=len(config.secondaries),
    )


class ClassMeansPolicy(StagePolicy):
    """Rules and disclosure of encoders that are fitted to sums of records by class."""

    def applies(self, config: FederationConfig) -> bool:
        """Return whether encoders are class means."""
        return config.encoder_reads_labels

    def require(self, config: FederationConfig) -> None:
        """Refuse class means where the bound on what a record does to class sums would not hold.

        Raises:
            ConfigError: If records do not choose their rows, or a label may cost too little.
            PrivacyError: If the unit or the sampling does not go with sums over all records.
        """
        encoder, privacy = encoder_of(config), config.privacy
        width = config.family.cut_shape(config.model)[1]
        if config.scores and width != 1:
            raise ConfigError(
                f"[model]: class means of two classes, or of a number, are one score a record, and "
                f'a row\'s release has {width} numbers; write family = "class-means"'
            )
        smallest = SMALLEST_EPSILON * config.labels_moved
        if encoder.labels != "plaintext" and encoder.label_epsilon < smallest:
            raise ConfigError(
                f"encoder.label_epsilon: must be at least {smallest:g}, got "
                f"{encoder.label_epsilon!r}; below it nothing is left of labels"
            )
        if privacy.mechanism == "none":
            return
        if config.linkage.choose != "records":
            raise ConfigError(
                'encoder.method: "class-means" is fitted to sums over linked records, and where '
                "rows choose their records one that goes makes room for another; write "
                'linkage.choose = "records"'
            )
        if privacy.unit == "linked-row":
            raise PrivacyError(
                'privacy.unit: "linked-row" hides a row\'s links, and class means are fitted to '
                "all of them; "
                'take "secondary-record" or "entity", or method = "principal"'
            )
        if privacy.sampling_rate < 1:
            raise PrivacyError(
                "privacy.sampling_rate: class means are fitted to all records, sampled or not; set "
                "it to 1"
            )

    def require_helpers(self, config: FederationConfig) -> None:
        """Refuse labels under masks in a federation without a dealer.

        Raises:
            ConfigError: If there is no dealer.
        """
        if hides_labels(config):
            dealer_of(config)

    def helpers(self, config: FederationConfig) -> tuple[str, ...]:
        """Return the dealer of masks, where labels stay at home."""
        return ("dealer",) if hides_labels(config) else ()

    def label_release(self, config: FederationConfig) -> LabelRelease:
        """Return the labels that encoders are fitted to."""
        return labels_released(config)

    def channels(self, config: FederationConfig) -> Iterator[Channel]:
        """Yield what the fitting of encoders shows, of records and of labels."""
        encoder, reveals = encoder_of(config), KEPT_STATISTICS
        if hides_labels(config):
            reveals = (
                "the primary: each secondary's sum of records for each class, behind that "
                "secondary's noise; the dealer, which must collude with no party: sizes"
            )
        yield Channel(
            "fitting of encoders", reveals, covered_by_noise(config), "secondaries", "primary"
        )
        covered = (
            f"covered by label_epsilon = {encoder.label_epsilon:g}, any one row's label, against"
        )
        if encoder.labels == "plaintext":
            yield Channel(
                _LABELS,
                "every secondary: each training row's label, and which rows train",
                NOT_COVERED,
                "primary",
                "secondaries",
            )
        elif encoder.labels == "randomised":
            yield Channel(
                _LABELS,
                "every secondary: each training row's label by randomised response, the same draw "
                "for all; which rows train",
                f"{covered} all secondaries together; which rows train is not covered",
                "primary",
                "secondaries",
            )
        else:
            yield Channel(
                _LABELS,
                "each secondary: the sum of its own records for each class, behind noise of its "
                "own and of the primary's",
                f"{covered} one secondary that follows the protocol; the dealer together with a "
                f"secondary sees labels",
                "primary",
                "secondaries",
            )
