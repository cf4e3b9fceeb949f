"""A party of an audit whose installed code was altered: all but the first add no noise."""

import sys

from securevfl.studies.audit import party as audit_party
from securevfl.studies.audit import worlds as audit_worlds

build = audit_worlds.build_secondary


def build_without_noise(config, party, *arguments, **settings):
    """Build a secondary as installed, and take its noise away unless it is the first."""
    secondary = build(config, party, *arguments, **settings)
    if party.name != "secondary-1":
        secondary.contribution.noise = None
    return secondary


if __name__ == "__main__":
    audit_worlds.build_secondary = build_without_noise
    audit_party.main(sys.argv[1:])
