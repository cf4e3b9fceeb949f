"""What a run leaves behind: ``metrics.json`` and ``history.csv`` (DESIGN 5.3)."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from securevfl.core import files
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.config import FederationConfig
from securevfl.federation.ledger import Ledger
from securevfl.federation.linking.reveals import reveals_of
from securevfl.federation.linking.rules import keys_are_numbers

HISTORY_FIELDS = ("epoch", "loss", "train", "validation", "seconds", "epsilon", "bytes")


def write_history(run_folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write ``history.csv``: a row an epoch."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, HISTORY_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: row.get(name, "") for name in HISTORY_FIELDS} for row in history)
    files.write_text(run_folder / "history.csv", buffer.getvalue())


def finite_or_none(value: float) -> float | None:
    """Return a figure that JSON can hold: None stands for "no bound"."""
    return value if math.isfinite(value) else None


def write_federation(run_folder: Path, config: FederationConfig) -> None:
    """Write ``federation.toml``: the file that this run really had."""
    files.write_text(run_folder / "federation.toml", tomli_w.dumps(dict(config.source)))


def privacy_figures(config: FederationConfig, plan: ReleasePlan, ledger: Ledger) -> dict[str, Any]:
    """Return the ``privacy`` part of ``metrics.json``.

    Args:
        config: The federation file.
        plan: What was planned; the promise was made for all of it.
        ledger: What was spent: by this session, and by those before it on the same ledger.
    """
    privacy = config.privacy
    tau = plan.noise_share_std()
    multiplier = tau * math.sqrt(plan.parties - privacy.colluding) / plan.sensitivity()
    updates = {}
    if privacy.encoder == "dp-trained":
        updates = {
            "gradient_noise_multiplier": privacy.update_noise_ratio * plan.release_multiplier(tau),
            "gradient_noise_std": plan.gradient_noise_std(tau),
            "gradient_clip_norm": privacy.update_clip_norm,
            "updates": ledger.updates,
        }
    return {
        "mechanism": privacy.mechanism,
        "epsilon": finite_or_none(ledger.spent),
        "epsilon_planned": finite_or_none(plan.epsilon(tau)),
        "epsilon_as_published": finite_or_none(plan.epsilon_as_published(tau)),
        "delta": privacy.delta,
        "unit": privacy.unit,
        "encoder": privacy.encoder,
        "links_per_record": privacy.links_per_record,
        "sampling_rate": privacy.sampling_rate,
        "colluding": privacy.colluding,
        "accounting": privacy.accounting,
        "noise_multiplier": multiplier,
        "noise_share_std": tau,
        "fitting_noise_multiplier": plan.fitting_multiplier(),
        "sensitivity": plan.sensitivity(),
        "clip_norm": privacy.clip_norm,
        "releases": ledger.all_rounds,
        "row_releases": ledger.all_row_releases,
        "secondaries": plan.parties,
        **updates,
        "statement": plan.statement(),
        "as_published_note": _AS_PUBLISHED_NOTE,
        "channels": channels(config),
    }


_AS_PUBLISHED_NOTE = (
    "The papers count one step of sampled DP-SGD a round, with the noise of the average over the "
    "clip norm as its multiplier. That misses that a row moves by up to twice the clip norm, that "
    "one record is linked to several rows and that trained encoders remember records; on the other "
    "side, that frozen encoders release each row once and that pooled records move a row by less. "
    "So its figure may lie on either side of the sound one."
)


def channels(config: FederationConfig) -> list[dict[str, str]]:
    """Return every way in which a party learns something, and what covers it (DESIGN 7)."""
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
