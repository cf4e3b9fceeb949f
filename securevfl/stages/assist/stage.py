"""Assisted boosting as a stage of a run: its own primary, secondaries and labels."""

from torch import nn

from securevfl.core.progress import Observer
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.rounds.primary import PrimaryData
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.stage import PrimaryContext, RunStage, SecondaryBuild, StageAtPrimary
from securevfl.stages.assist.family import AssistBottom, AssistTop
from securevfl.stages.assist.messages import AssistValidator
from securevfl.stages.assist.parties import AssistPrimary, AssistSecondary, release_labels


class _LabelRelease(StageAtPrimary):
    """The primary's part: charge for labels before the first residuals are made of them."""

    def __init__(self, context: PrimaryContext, primary: AssistPrimary) -> None:
        self._context = context
        self._primary = primary

    def begin(self) -> None:
        """Charge for the labels that secondaries receive; randomise them where promised."""
        context = self._context
        labels = release_labels(
            context.plan,
            context.table,
            self._primary.data,
            ledger=context.files.ledger,
            files=context.files.checkpoints.files,
            estimator=context.estimator,
        )
        self._primary.use_released_labels(labels)


class AssistStage(RunStage):
    """Rounds in which secondaries fit models of their own to residuals."""

    def primary(self, context: PrimaryContext) -> StageAtPrimary:
        """Return the primary's part, which releases labels."""
        if not isinstance(context.primary, AssistPrimary):
            raise TypeError(f"the primary of assisted boosting is no {type(context.primary)}")
        return _LabelRelease(context, context.primary)

    def build_primary(
        self,
        plan: RunPlan,
        data: PrimaryData,
        top: nn.Module,
        exchange: Exchange,
        *,
        observe: Observer,
    ) -> AssistPrimary | None:
        """Return a primary that sends residuals."""
        if not isinstance(top, AssistTop):
            return None
        return AssistPrimary(plan, data, top, exchange, observe=observe)

    def build_secondary(self, build: SecondaryBuild) -> AssistSecondary | None:
        """Return a secondary that fits models to residuals."""
        if not isinstance(build.bottom, AssistBottom):
            return None
        return AssistSecondary(
            build.data,
            build.bottom,
            build.contribution,
            validator=AssistValidator(build.limits),
            dropout=build.dropout,
            seed=build.seed,
        )
