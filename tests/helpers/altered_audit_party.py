"""A party of an audit whose installed code was altered: all but the first add no noise."""

import sys

from securevfl.studies.audit import party, worlds

build = worlds.build_secondary


def build_without_noise(config, settings_of_party, *arguments, **settings):
    """Build a secondary as installed, and take its noise away unless it is the first."""
    secondary = build(config, settings_of_party, *arguments, **settings)
    if settings_of_party.name != "secondary-1":
        secondary.contribution.noise = None
    return secondary


if __name__ == "__main__":
    worlds.build_secondary = build_without_noise
    party.main(sys.argv[1:])
