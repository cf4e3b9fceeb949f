"""Class means as a stage of a run: each party's part, in one process and between processes."""

from collections.abc import Mapping
from functools import partial
from typing import Final

from securevfl.config.federation import FederationConfig
from securevfl.federation.session.handshake import Joined
from securevfl.federation.stage import PrimaryContext, RunStage, SecondaryContext, StageAtSecondary
from securevfl.stages.class_means.class_labels import class_labels_of
from securevfl.stages.class_means.fitting import ClassMeansFitting
from securevfl.stages.class_means.parties import (
    AT_DEALER,
    AT_PRIMARY,
    AT_SECONDARY,
    ClassMeansPrimary,
    ClassMeansSecondary,
    HiddenSums,
    MaskedLines,
    SumsInOneProcess,
    SumsUnderMasks,
    deal_class_sums,
    parties_of,
)
from securevfl.stages.class_means.policy import dealer_of, hides_labels

_COLUMNS: Final = "columns.pt"


class ClassMeansStage(RunStage):
    """Encoders that are fitted to sums of records by class, before the first row is released."""

    def primary(self, context: PrimaryContext) -> ClassMeansPrimary:
        """Return the primary's part: it calls for class means, and has labels meet them."""
        plan, primary, state = context.plan, context.primary, context.files.checkpoints.files
        make = partial(
            class_labels_of, plan, primary.data, context.table, context.files.ledger, state
        )
        if state.holds(_COLUMNS):
            # Where all rows were released before, secondaries are not called again.
            primary.fitted_columns = int(state.read(_COLUMNS)["columns"])

        def note_columns(columns: int) -> None:
            primary.fitted_columns = columns
            state.write(_COLUMNS, {"columns": columns})

        return ClassMeansPrimary(
            plan,
            context.peers,
            make,
            sums=_hidden_sums(context),
            observe=context.observe,
            note_columns=note_columns,
        )

    def secondary(self, context: SecondaryContext) -> StageAtSecondary | None:
        """Return a secondary's part, which fits its encoder; None where none is kept."""
        plan, kept, lines = context.plan, context.secondary.kept, None
        if kept is None:
            return None
        fitting = ClassMeansFitting(plan, context.party, kept)
        kept.fit = fitting
        if context.open_channels is not None and hides_labels(plan.config):
            channels = context.open_channels(parties_of(plan.config), AT_SECONDARY)
            lines = MaskedLines(channels, dealer_of(plan.config))
        return ClassMeansSecondary(plan, fitting, lines)

    def help(
        self, config: FederationConfig, role: str, star: Joined
    ) -> tuple[str, Mapping[str, int]] | None:
        """Deal masks for class sums, where labels stay at home and this is the dealer."""
        if role != "dealer" or not hides_labels(config):
            return None
        lines = star.channels(config, parties_of(config), AT_DEALER)
        return "dealt for class means", {"secondaries": deal_class_sums(config, lines, star.facts)}


def _hidden_sums(context: PrimaryContext) -> HiddenSums | None:
    """Return how labels that stay at home meet class sums; None where they are sent."""
    config = context.plan.config
    if not hides_labels(config):
        return None
    if context.open_channels is None:
        return SumsInOneProcess(context.plan, context.peers)
    lines = context.open_channels(parties_of(config), AT_PRIMARY)
    return SumsUnderMasks(context.plan, lines, dealer_of(config))
