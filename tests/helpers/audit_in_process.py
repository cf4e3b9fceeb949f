"""The audit's own statistics on the simulator, whose parts a test can alter."""

import time
from collections.abc import Callable

import numpy as np

from securevfl.core.errors import EncodingRangeError
from securevfl.federation.rounds.exchanges import Exchange, SimulatedExchange
from securevfl.federation.rounds.secondary import Secondary
from securevfl.lab.audit.audit_report import AuditReport, report_of
from securevfl.lab.audit.audit_statistics import RELEASES, AuditSettings, Release
from securevfl.lab.audit.audit_worlds import AuditStage


def audit_in_process(
    settings: AuditSettings,
    *,
    alter: Callable[[Secondary], None] | None = None,
    wrap: Callable[[Exchange], Exchange] | None = None,
) -> AuditReport:
    """Audit the simulator, which has the same arithmetic without processes, masks or TLS.

    Args:
        settings: What is audited.
        alter: Changes each secondary before the first round, to make a wrong mechanism.
        wrap: The same for the exchange.
    """
    started = time.monotonic()
    stages = {release: AuditStage(settings, release) for release in RELEASES}
    revealed: dict[Release, np.ndarray] = {}
    refusal = None
    for release, stage in stages.items():
        secondaries = {
            rank: stage.secondary(rank, None) for rank in range(1, settings.secondaries + 1)
        }
        for secondary in secondaries.values():
            if alter is not None:
                alter(secondary)
        exchange: Exchange = SimulatedExchange(secondaries, stage.plan.cut)
        if wrap is not None:
            exchange = wrap(exchange)
        try:
            revealed[release] = stage.run(exchange)
        except EncodingRangeError as error:
            refusal = str(error)
    return report_of(stages, revealed, started=started, refusal=refusal)
