"""The federation file: the TOML file that all parties of a federation agree on."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from securevfl.config import sections
from securevfl.config.encoder import EncoderSettings
from securevfl.config.linkage import LinkageSettings
from securevfl.config.presets import TopEstimator
from securevfl.core.errors import ConfigError
from securevfl.core.waits import Waits
from securevfl.data.tables import SplitKind
from securevfl.dp.privacy import Privacy
from securevfl.dp.regime import Regime
from securevfl.dp.release_plan import FittingPlan
from securevfl.linkage import spec
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.stage.linkage_parts import METRICS, PROTECTIONS
from securevfl.models.family import AnyFamily, FamilySettings, PretrainingSettings
from securevfl.models.task_metrics import metrics_of


@dataclass(frozen=True, kw_only=True)
class FederationConfig:
    """A whole federation file, checked."""

    federation: sections.FederationSettings
    training: sections.TrainingSettings
    base: sections.BaseSettings
    privacy: Privacy
    mpc: sections.MpcSettings
    linkage: LinkageSettings
    prediction: sections.PredictionSettings
    runtime: sections.RuntimeSettings
    parties: tuple[sections.PartySettings, ...]
    family: AnyFamily
    model: FamilySettings
    """The family's own settings, an instance of ``family.settings_class``."""
    top: TopEstimator | None
    """An estimator in place of the family's top network; None for the network."""
    pretraining: PretrainingSettings
    """How families with pretraining pretrain; others read nothing of it."""
    encoder: EncoderSettings | None
    """How frozen encoders are made; None leaves that to the family."""
    source: Mapping[str, Any] = field(repr=False)
    """The parsed file, for the hash that parties compare; what ``auto`` chose is written out."""
    chosen: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Settings that ``auto`` has chosen, by ``table.name``; empty where the file says all."""

    @property
    def regime(self) -> Regime:
        """How encoders come by their weights, and what follows from it."""
        return self.privacy.regime

    @property
    def primary(self) -> sections.PartySettings:
        """The party that holds the labels."""
        return next(party for party in self.parties if party.role == "primary")

    @property
    def address(self) -> str:
        """Address of the primary, which all others call; every checked file has one."""
        return self.primary.address or ""

    @property
    def secondaries(self) -> tuple[sections.PartySettings, ...]:
        """The other parties, in the order of the file; the first has rank 1."""
        return tuple(party for party in self.parties if party.role == "secondary")

    @property
    def table_parties(self) -> tuple[sections.PartySettings, ...]:
        """The parties that hold a table, in the order of the file."""
        return tuple(party for party in self.parties if not party.is_helper)

    @property
    def callers(self) -> tuple[sections.PartySettings, ...]:
        """Everybody who dials the primary: the secondaries by rank, then coordinator and dealer."""
        helpers = (self.helper("coordinator"), self.helper("dealer"))
        return (*self.secondaries, *(party for party in helpers if party is not None))

    def helper(self, role: Literal["coordinator", "dealer"]) -> sections.PartySettings | None:
        """Return the party without a table that has a certain role, if there is one."""
        return next((party for party in self.parties if party.role == role), None)

    @property
    def engine(self) -> sections.Engine:
        """Engine that averages rows: what ``[mpc]`` says, or CrypTen where there is a dealer.

        A simulation stands for the dealer that a linkage or ``encoder.labels`` needs.
        """
        if self.mpc.engine is not None:
            return self.mpc.engine
        deals = "dealer" in PROTECTIONS[self.linkage.protection].helpers or (
            self.encoder is not None and self.encoder.labels == "shares"
        )
        dealer = deals or self.helper("dealer") is not None
        return "crypten" if dealer and len(self.secondaries) > 1 else "masked"

    @property
    def ranks(self) -> dict[str, int]:
        """Name to rank: the primary is 0, secondaries count from 1, helpers come after them."""
        return {
            self.primary.name: 0,
            **{party.name: rank for rank, party in enumerate(self.callers, 1)},
        }

    @property
    def encoder_reads_labels(self) -> bool:
        """Whether frozen encoders are fitted to the primary's labels too."""
        return self.encoder is not None and self.encoder.labels is not None

    def party(self, name: str) -> sections.PartySettings:
        """Return the settings of one party.

        Raises:
            ConfigError: If no party has that name.
        """
        for party in self.parties:
            if party.name == name:
                return party
        names = ", ".join(party.name for party in self.parties)
        raise ConfigError(f"party {name!r}: is not in the federation file, which has {names}")

    @property
    def metric(self) -> str:
        """Name of the metric that training optimises."""
        return metrics_of(self.federation.task, self.training.metric)[0].name

    @property
    def learning_rate(self) -> float:
        """Step size of every party's optimizer: what ``[training]`` says, or else the family."""
        asked = self.training.learning_rate
        return self.family.learning_rate if asked is None else asked

    @property
    def label_epsilon(self) -> float | None:
        """Epsilon of one training row's label against secondaries; None where none is promised."""
        if self.encoder is not None and self.encoder.labels in ("randomised", "shares"):
            return self.encoder.label_epsilon
        return self.training.label_epsilon

    @property
    def scores(self) -> bool:
        """Whether encoders send one score a record: fitted to labels of two classes."""
        return self.encoder_reads_labels and self.federation.task != "multiclass"

    @property
    def encoder_classes(self) -> int:
        """The number of classes that encoders are fitted to; of a number, its halves."""
        return 2 if self.scores else self.family.cut_shape(self.model)[1]

    @property
    def in_blocks(self) -> bool:
        """Whether every secondary writes into coordinates of the sum that are its own."""
        return self.encoder is not None and self.encoder.in_blocks

    @property
    def fitting(self) -> FittingPlan | None:
        """What the fitting of encoders takes; None if nothing is fitted.

        Scores take three noised answers: distributions of columns, class sums, and a distribution
        of scores.
        """
        if self.encoder is None or self.encoder.method == "random":
            return None
        return FittingPlan(share=self.encoder.share, steps=3 if self.scores else 1)

    @property
    def labels_moved(self) -> int:
        """How many rows change their class in class sums, at most, if one label is exchanged.

        A number's class is by its rank: with its own row it takes one more over each border between
        classes. What a drawn label may cost is divided among them; noise on sums is made for how
        far they move these together.
        """
        return self.encoder_classes if self.federation.task == "regression" else 1

    @property
    def waits(self) -> Waits:
        """How long parties wait for one another."""
        runtime = self.runtime
        return Waits(
            join_s=runtime.join_timeout_s,
            return_s=0.0 if runtime.on_loss == "stop" else runtime.wait_s,
            round_s=runtime.round_timeout_s,
            idle_s=runtime.idle_timeout_s,
            silence_s=runtime.silence_timeout_s,
        )

    @property
    def helpers_stay(self) -> bool:
        """Whether coordinator and dealer stay to the run's end, to link anew after a loss."""
        return self.runtime.on_loss == "wait"

    def stays(self, party: sections.PartySettings) -> bool:
        """Whether a party without a table stays to the run's end, to link anew."""
        return party.is_helper and self.helpers_stay

    @property
    def reserves_budget(self) -> bool:
        """Whether the plan covers one pass over the training and test rows more than needed.

        A loss within the last epoch, or once test rows are charged, takes as much: a run that
        continues without its user can then still test what it has trained.
        """
        budgeted = self.privacy.mechanism != "none" and self.privacy.accounting == "sound"
        return self.runtime.on_loss != "stop" and budgeted and self.regime.learns

    @property
    def releases_per_record(self) -> int | None:
        """N: rows of all predictions of a model that one record may be released in.

        Secondaries count them. What is asked for may depend on the answers, and a record that is
        gone makes room for no other one: how often each one is released bounds what all requests
        show of it. None where every request is a release of its own.
        """
        if not (self.privacy.bounds_a_record and self.linkage.choose == "records"):
            return None
        return self.prediction.releases_per_record or self.privacy.links_per_record

    @property
    def split_kind(self) -> SplitKind:
        """How the primary's rows are split.

        Secondaries know the seed, so a split by classes shows labels: where labels have an epsilon
        the split is a function of everything but their values.
        """
        training = self.training
        if training.split is None and self.label_epsilon is not None:
            return "random"
        return training.split_of(self.federation.task)

    @property
    def features_are_declared(self) -> bool:
        """Whether a promise rests on it that nothing of secondaries' features is taken from data.

        A frozen or dp-trained encoder's guarantee is about what one record's features do, so these
        may be a function of no other record.
        """
        return self.regime.caps_records and self.privacy.mechanism != "none"

    @property
    def digest(self) -> str:
        """SHA-256 of the file's content (not its spelling), hex; parties compare it."""
        return _digest(self.source)

    @property
    def settings_digest(self) -> str:
        """Like :attr:`digest`, without addresses and identities, which a restart may change."""
        return _digest({**self.source, "party": _without_places(self.source)})

    @property
    def model_digest(self) -> str:
        """Like :attr:`settings_digest`, of what a kept model rests on alone.

        How long parties wait, what predictions may spend and what a comparison trains may change;
        and of a protection's settings those that it calls changeable.
        """
        left_out = ("methods", "prediction", "runtime")
        kept = {name: table for name, table in self.source.items() if name not in left_out}
        linkage = self.source.get("linkage", {})
        changeable = PROTECTIONS[self.linkage.protection].changeable
        kept["linkage"] = {name: linkage[name] for name in linkage if name not in changeable}
        return _digest({**kept, "party": _without_places(self.source)})


def _without_places(source: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in party.items() if key not in ("address", "identity")}
        for party in source["party"]
    ]


def _digest(source: Mapping[str, Any]) -> str:
    text = json.dumps(source, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def key_spec(config: FederationConfig) -> KeySpec:
    """Return which keys are compared, and how."""
    linkage = config.linkage
    return KeySpec(
        columns=config.primary.key,
        metric=METRICS[linkage.metric],
        fields=None if linkage.fields is None else linkage.field_list(),
        missing_similarity=linkage.missing_similarity,
        ranges=linkage.ranges,
        blocking=linkage.blocking,
        fold=linkage.fold,
        spelling=linkage.spelling,
        code_bits=linkage.code_bits,
        code_concentration=linkage.code_concentration,
    )


def tells_rows(config: FederationConfig) -> bool:
    """Whether the primary learns which of its rows are linked, to train on these alone.

    Cross-party pretraining needs that, and so does ``training.rows = "aligned"``.
    """
    return "cross" in config.family.pretraining or config.training.rows == "aligned"


def links_equal_ids(config: FederationConfig) -> bool:
    """Whether equal keys alone are links, as one number is the key and the file has no distance.

    Where rows have to be aligned, such a key is an id: the nearest id is somebody else's.
    """
    linkage = config.linkage
    one_number = linkage.metric == "euclidean" and len(config.primary.key) == 1
    return one_number and linkage.max_distance is None and tells_rows(config)


def _farthest(config: FederationConfig) -> float:
    if links_equal_ids(config):
        return 0.0
    return math.inf if config.linkage.max_distance is None else config.linkage.max_distance


def link_spec(config: FederationConfig) -> spec.LinkSpec:
    """Return all that linking needs; a run asks once and hands it on."""
    linkage, privacy, training = config.linkage, config.privacy, config.training
    similarities = None
    if config.family.needs_similarities(config.model):
        similarities = spec.SimilaritySpec(
            noise=linkage.similarity_noise, tau=linkage.similarity_tau
        )
    return spec.LinkSpec(
        keys=key_spec(config),
        hiding=spec.HidingSpec(protection=linkage.protection, settings=linkage.protection_settings),
        choice=spec.ChoiceSpec(
            neighbours=config.model.neighbours,
            by=linkage.choose,
            links_per_record=privacy.links_per_record,
            sampling_rate=privacy.sampling_rate,
            once=config.regime.releases_once,
            max_distance=min(config.family.max_distance, _farthest(config)),
            counted=True,
        ),
        roles=spec.LinkRoles(
            primary=config.primary.name,
            secondaries=tuple(party.name for party in config.secondaries),
            helpers={
                party.role: party.name
                for party in config.callers
                if party.role in PROTECTIONS[linkage.protection].helpers
            },
        ),
        split=spec.SplitSpec(
            seed=config.federation.seed,
            validation_fraction=training.validation_fraction,
            test_fraction=training.test_fraction,
        )
        if config.split_kind == "random"
        else None,
        similarities=similarities,
        tells_rows=tells_rows(config),
        wait=config.waits.work,
        written=config.source["linkage"],
    )
