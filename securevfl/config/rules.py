"""Rules across sections of a federation file: what must go together."""

from pathlib import Path
from typing import Final

from securevfl.config.federation import FederationConfig, key_spec, tells_rows
from securevfl.config.linkage import quote_choices
from securevfl.config.sections import IN_MEMORY
from securevfl.config.stage_policy import policies
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.sources.settings import require_one_role, require_own_tables
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.dp.labels import SMALLEST_EPSILON
from securevfl.linkage.stage.linkage_parts import PROTECTIONS
from securevfl.models.task_metrics import metrics_of

LARGEST_COMPLETE: Final = 16
"""Up to so many secondaries all share masks with all: key streams are a few milliseconds then."""


def _require_maskable(config: FederationConfig) -> None:
    """Check that the federation is large enough for the masks that its file asks for."""
    degree, secondaries = config.privacy.mask_degree, len(config.secondaries)
    if degree is None:
        return
    if secondaries <= LARGEST_COMPLETE:
        raise ConfigError(
            f"privacy.mask_degree: is offered from {LARGEST_COMPLETE + 1} secondaries on, and "
            f"these are {secondaries}; leave it out, and all of them share masks with all"
        )
    if degree >= secondaries - 1:
        raise ConfigError(
            f"privacy.mask_degree: {degree} are all the others of {secondaries} secondaries; "
            f"leave it out, or write an even number of at most {(secondaries - 2) // 2 * 2}"
        )


def require_own_files(config: FederationConfig, data_root: Path) -> None:
    """Check that no two parties of this machine have one table.

    Raises:
        ConfigError: Naming the two.
    """
    there = [party for party in config.table_parties if party.data != IN_MEMORY]
    require_own_tables((party.name, data_root / party.data, party.reading) for party in there)


def require_linkable(config: FederationConfig) -> None:
    """Check that linkage, keys, roles, masks and encoders go together.

    Raises:
        ConfigError: Naming the field, the rule and the value.
    """
    linkage, names = config.linkage, config.primary.key
    keys = key_spec(config)
    keys.metric.check(keys)
    truth = () if linkage.truth is None else (linkage.truth,)
    for party in config.table_parties:
        keys.metric.check_names(party.key)
        label = () if party.label is None else (party.label,)
        require_one_role(
            {"key": party.key, "label": label, "linkage.truth": truth, "exclude": party.exclude},
            where=f"party {party.name!r}: ",
        )
    protection = PROTECTIONS[linkage.protection]
    if (reason := protection.objection_to(keys.metric)) is not None:
        takers = [
            name for name, other in PROTECTIONS.items() if not other.objection_to(keys.metric)
        ]
        raise ConfigError(
            f'linkage.protection: "{protection.name}" {reason}; metric = {keys.metric.name!r} goes '
            f"with {quote_choices(takers)}"
        )
    protection.check(keys)
    if linkage.max_distance is not None:
        protection.check_distance(keys, linkage.max_distance)
    if linkage.fields is not None and set(linkage.fields) != set(names):
        wrong = min(set(linkage.fields) ^ set(names))
        raise ConfigError(
            f"linkage.fields: {wrong!r} is {'no' if wrong in linkage.fields else 'a'} key column "
            f"of {config.primary.name!r}, whose columns need a field each: {', '.join(names)}"
        )
    if linkage.ranges is not None:
        numbers = sum(kind == "number" for kind in keys.kinds.values())
        if len(linkage.ranges) != numbers:
            raise ConfigError(
                f"linkage.ranges: must have one [low, high] for each of the {numbers} numeric key "
                f"columns, got {len(linkage.ranges)}"
            )
    _require_roles(config)
    if linkage.choose == "records":
        _require_pooled_records(config)
    if config.prediction.releases_per_record and config.releases_per_record is None:
        raise ConfigError(
            'prediction.releases_per_record: goes with noise, linkage.choose = "records" without '
            "samples, and a unit of records or entities; leave it out"
        )
    _require_maskable(config)
    _require_encodable(config)


def _require_pooled_records(config: FederationConfig) -> None:
    privacy = config.privacy
    missing = []
    if config.regime.learns:
        missing.append('privacy.encoder = "frozen"')
    if not config.family.pools_records(config.model, frozen=True):
        missing.append('a family that pools records: family = "fet" with model.release = "pooled"')
    if not privacy.links_per_record:
        missing.append("privacy.links_per_record")
    if missing:
        raise ConfigError(
            f'linkage.choose: "records" needs {" and ".join(missing)}; write that, or '
            f'linkage.choose = "rows"'
        )


def _require_roles(config: FederationConfig) -> None:
    protection = PROTECTIONS[config.linkage.protection]
    if config.helper("coordinator") is not None and "coordinator" not in protection.helpers:
        raise ConfigError(
            'party.role: a "coordinator" links in place of the parties; with '
            f'linkage.protection = "{protection.name}" there is nothing for it to do'
        )
    needed = {role for policy in policies(config).values() for role in policy.helpers(config)}
    used = "dealer" in (*protection.helpers, *needed) or "mpc" in config.source
    if config.helper("dealer") is not None and not used:
        takers = [other.name for other in PROTECTIONS.values() if "dealer" in other.helpers]
        raise ConfigError(
            f'party.role: a "dealer" goes with linkage.protection = "{" or ".join(takers)}", '
            f'encoder.labels = "shares" or an [mpc] table alone'
        )


def require_helpers(config: FederationConfig) -> None:
    """Check that the third parties that linkage and stages rest on take part.

    In one process everything is in one place anyway; between parties they are needed.

    Raises:
        ConfigError: Naming the role that is missing.
    """
    linkage, protection = config.linkage, PROTECTIONS[config.linkage.protection]
    there = {party.role for party in config.parties}
    for role in protection.helpers:
        if role not in there:
            raise ConfigError(
                f"linkage.protection: {linkage.protection!r} needs a party that holds no table: "
                f'add [[party]] name = "{role}", role = "{role}"'
            )
    for policy in policies(config).values():
        policy.require_helpers(config)


def _require_defensible(config: FederationConfig) -> None:
    """Refuse an epsilon of labels where no gradients are sent, or where it would not hold."""
    training, task = config.training, config.federation.task
    if training.label_epsilon is None:
        return
    if not config.regime.learns:
        raise ConfigError(
            "training.label_epsilon: frozen encoders are sent no gradients; leave it out"
        )
    if task == "regression":
        raise ConfigError(
            "training.label_epsilon: is of classes, and the task is regression; leave it out"
        )
    if config.base.exists:
        raise ConfigError(
            "training.label_epsilon: a base is fitted to labels as they are, and helps to choose "
            'the best epoch, which secondaries see; write [base] estimator = "none"'
        )
    if training.label_epsilon < SMALLEST_EPSILON:
        raise ConfigError(
            f"training.label_epsilon: must be at least {SMALLEST_EPSILON:g}, got "
            f"{training.label_epsilon!r}; below it nothing is left of labels"
        )


def _require_split(config: FederationConfig) -> None:
    """Check that rows can be split as asked, and not by labels that have an epsilon."""
    if config.federation.task == "regression" and config.training.split == "stratified":
        raise ConfigError(
            'training.split: "stratified" needs classes, and the task is regression; leave it out'
        )
    if config.label_epsilon is not None and config.training.split == "stratified":
        raise ConfigError(
            'training.split: "stratified" chooses rows by their labels, with a seed that every '
            "party knows, so label_epsilon would not hold; leave it out, for a random split"
        )
    if config.training.split_column == config.primary.label:
        raise ConfigError("training.split_column: is the label; name another column")


def require_trainable(config: FederationConfig) -> None:
    """Check that the model can be trained on what linkage gives.

    Raises:
        ConfigError: Naming the field, the rule and the value.
    """
    if config.primary.label is None:
        raise ConfigError("party.label: the primary must name its label column")
    if config.primary.positive is not None and config.federation.task != "binary":
        raise ConfigError(
            f"party.positive: is one of two classes; leave it out of a {config.federation.task} "
            f"task, which has no such class"
        )
    metrics_of(config.federation.task, config.training.metric)
    for policy in policies(config).values():
        policy.require(config)
    _require_split(config)
    if config.training.threshold not in ("auto", "half") and config.federation.task != "binary":
        raise ConfigError(
            f"training.threshold: divides two classes; a {config.federation.task} task has none, "
            f"leave it out"
        )
    _require_defensible(config)
    _require_computable(config)
    _require_fitted(config)
    _require_products(config)
    keys = key_spec(config)
    linkers = "top1sim, avgsim" + ("" if keys.metric.equal_only else ", fedsim, featuresim")
    if _reads_keys(config) and not keys.are_numbers:
        raise ConfigError(
            f"model.family: {config.family.name!r} takes the keys' positions as inputs, and "
            f"linkage.metric = {config.linkage.metric!r} gives no numeric keys without gaps; "
            f'choose a family that links by keys alone ({linkers}), or, for "fet", '
            f'privacy.encoder = "frozen", model.top = "additive" and '
            f"model.keys_as_features = false"
        )
    if config.family.needs_similarities(config.model) and keys.metric.equal_only:
        raise ConfigError(
            f"model.family: {config.family.name!r} reads how near links are, and those of "
            f"linkage.metric = {config.linkage.metric!r} are all equally near; choose top1sim or "
            f"avgsim"
        )
    fresh = config.privacy.sampling_rate < 1
    if fresh and config.regime.learns and tells_rows(config):
        raise ConfigError(
            "privacy.sampling_rate: rows are aligned for good, and links within a fresh sample "
            'change from round to round; set it to 1, or training.rows to "all" and a family '
            "without cross-party pretraining"
        )
    if not config.family.needs_similarities(config.model):
        return
    helpers = PROTECTIONS[config.linkage.protection].helpers
    if fresh and (config.regime.learns or "coordinator" in helpers):
        raise ConfigError(
            f"privacy.sampling_rate: {config.family.name!r} reads similarities, which are noised "
            f"once and sent once, so links can't change from round to round; set it to 1"
        )
    if config.linkage.choose == "records":
        raise ConfigError(
            f'linkage.choose: {config.family.name!r} reads K similarities a row; "records" gives '
            f'rows of different lengths; use "rows"'
        )


def _require_computable(config: FederationConfig) -> None:
    """Refuse sums on shares that would hide nothing."""
    if config.mpc.engine == "crypten" and len(config.secondaries) < 2:
        raise ConfigError(
            'mpc.engine: "crypten" shares rows among secondaries, and there is one; write "masked"'
        )


def _require_fitted(config: FederationConfig) -> None:
    """Refuse an estimator as top model where there are no releases that stay as they are."""
    if config.top is None:
        return
    name = config.top.name
    if config.regime.learns:
        raise ConfigError(
            f'model.top: "{name}" is fitted to releases that stay as they are, and a '
            f"{config.regime.name} encoder learns by a network's gradients; it needs "
            f'privacy.encoder = "frozen", or leave it out'
        )
    if config.top.corrects and not config.base.exists:
        raise ConfigError(
            f'model.top: "{name}" adds evidence to a base, and base.estimator is "none"; leave '
            f"[base] out, or take another top model"
        )


def _require_products(config: FederationConfig) -> None:
    """Refuse a precision of networks where none trains."""
    if config.training.precision != "float32" and config.top:
        raise ConfigError("training.precision: model.top trains no network; leave it out")


def _reads_keys(config: FederationConfig) -> bool:
    """Return whether a model reads the keys' positions; an estimator takes them if there are."""
    if config.top is not None:
        return config.model.keys_as_features
    return config.family.reads_keys(config.model, frozen=not config.regime.learns)


def _require_encodable(config: FederationConfig) -> None:
    """Refuse an ``[encoder]`` table that the rest of the federation file does not go with."""
    if config.encoder is None:
        return
    if config.regime.learns or not config.family.pools_records(config.model, frozen=True):
        raise ConfigError(
            "[encoder]: makes frozen encoders whose rows are pooled; it needs privacy.encoder = "
            '"frozen" and model.release = "pooled"; write these, or leave [encoder] out'
        )
    width, secondaries = config.family.cut_shape(config.model)[1], len(config.secondaries)
    if config.encoder.in_blocks and width % secondaries:
        raise ConfigError(
            f"model.hidden: {secondaries} secondaries must share it equally for encoder.layout = "
            f'"blocks", got {width}'
        )


def require_enough_records(config: FederationConfig, table: PartyTable | KeyTable) -> None:
    """Refuse a secondary's table that has fewer records than links of one row.

    Raises:
        DataError: Naming the table and both numbers.
    """
    if table.num_rows < config.model.neighbours:
        raise DataError(
            f"table of {table.name!r}: has {table.num_rows} records, fewer than "
            f"model.neighbours = {config.model.neighbours}; lower model.neighbours"
        )
