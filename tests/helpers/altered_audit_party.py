"""A party of an audit whose installed code was altered: all but the first add no noise."""

import sys
from typing import Any

from securevfl.config.sections import PartySettings
from securevfl.federation.build import build_secondary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunPlan
from securevfl.lab.audit import audit_party, audit_worlds


def build_without_noise(
    plan: RunPlan, settings_of_party: PartySettings, *arguments: Any, **settings: Any
) -> Secondary:
    """Build a secondary as installed, and take its noise away unless it is the first."""
    secondary = build_secondary(plan, settings_of_party, *arguments, **settings)
    if settings_of_party.name != "secondary-1":
        secondary.contribution.noise = None
    return secondary


if __name__ == "__main__":
    vars(audit_worlds)["build_secondary"] = build_without_noise
    audit_party.main(sys.argv[1:])
