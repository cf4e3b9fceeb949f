"""Membership: which secondaries answer a request for predictions, and what an absence changes.

A primary that may choose who answers could ask for one secondary alone, whose numbers the secure
sum is there to hide. So every secondary has a least number of its own reckoning.
"""

from collections.abc import Sequence
from dataclasses import replace

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.core import checks
from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.federation.run_plan import active_parties
from securevfl.linkage.spec import LinkSpec


def least_secondaries(config: FederationConfig) -> int:
    """Return how few secondaries may answer a request for predictions.

    ``prediction.least_secondaries``, where the file says it. Else, with noise, one more than may
    collude: the request's epsilon is computed for those that answer, so the promise holds for any
    number that an honest one is among. Without noise there is no promise, and fewer may answer
    only where training rounds had as few (``model.party_dropout``), or where each one's numbers
    have coordinates of their own.
    """
    stated = config.prediction.least_secondaries
    if stated is not None:
        return stated
    if config.privacy.mechanism != "none":
        return config.privacy.colluding + 1
    if config.in_blocks:
        # Without noise, each one's numbers are seen by themselves whoever answers.
        return 1
    if config.regime.releases_once:
        return len(config.secondaries)
    return active_parties(config.secondaries, config.model.party_dropout)


def active_without(config: FederationConfig, without: Sequence[str]) -> tuple[int, ...] | None:
    """Return the ranks of the secondaries that answer, ascending; None for all.

    Args:
        config: The federation file.
        without: Names of those that do not. Where these are all, nobody is asked.

    Raises:
        ConfigError: If one is no secondary, is named twice, or too few are left.
    """
    if not without:
        return None
    names = [party.name for party in config.secondaries]
    for name in without:
        if name not in names:
            near = checks.did_you_mean(name, names)
            raise ConfigError(
                f"without: there is no secondary {name!r}; there are {', '.join(names)}{near}"
            )
    if len(set(without)) != len(without):
        raise ConfigError(f"without: names a secondary twice, in {', '.join(without)}")
    left = [name for name in names if name not in without]
    if not left:
        return ()
    least = least_secondaries(config)
    if len(left) < least:
        raise ConfigError(
            f"without: leaves {len(left)} of {len(names)} secondaries, and {least} must answer; "
            f"write least_secondaries = {max(1, len(left))} in [prediction] of every party's file "
            f"if all of them agree to what that shows (docs/predictions.md)"
        )
    return tuple(config.ranks[name] for name in left)


def require_active(
    config: FederationConfig, active: Sequence[int] | None, *, rank: int, predicts: bool
) -> None:
    """Refuse a primary that leaves out parties as it must not.

    Args:
        config: The federation file, as this party has it.
        active: Ranks of the secondaries that take part, as the primary says; None: all.
        rank: This party's own.
        predicts: Whether a kept model is asked for predictions; else parties train.

    Raises:
        ProtocolError: If they are not some of the secondaries, ascending; this party is one and
            not among them; or they are fewer than this party's file allows.
    """
    if active is None:
        return
    if not predicts:
        raise ProtocolError("the primary leaves out parties of a run that trains")
    ranks = [config.ranks[party.name] for party in config.secondaries]
    if not active or sorted(set(active) & set(ranks)) != list(active):
        raise ProtocolError(
            f"the primary asks for predictions of impossible parties {active!r:.80}"
        )
    if rank in ranks and rank not in active:
        raise ProtocolError(
            f"the primary asks this party for predictions without it, of {list(active)!r}"
        )
    least = least_secondaries(config)
    if len(active) < least:
        raise ProtocolError(
            f"the primary asks for predictions of {len(active)} secondaries, and this party's file "
            f"wants {least} at least (prediction.least_secondaries)"
        )


def callers_in_predictions(
    config: FederationConfig, active: Sequence[int] | None
) -> tuple[str, ...]:
    """Return who dials the primary where a kept model answers, by rank.

    Args:
        config: The federation file.
        active: Ranks of the secondaries that answer; None: all.
    """
    absent = (*absent_names(config, active), *idle_helpers(config))
    return tuple(party.name for party in config.callers if party.name not in absent)


def idle_helpers(config: FederationConfig) -> tuple[str, ...]:
    """Return the names of helpers that predictions have no use for: new rows are never voted on."""
    needed = {*link_spec(config).roles.helpers.values()}
    return tuple(p.name for p in config.callers if p.is_helper and p.name not in needed)


def absent_names(config: FederationConfig, active: Sequence[int] | None) -> tuple[str, ...]:
    """Return the names of the secondaries that do not answer, by rank."""
    if active is None:
        return ()
    return tuple(p.name for p in config.secondaries if config.ranks[p.name] not in active)


def session_spec(config: FederationConfig, active: Sequence[int] | None) -> LinkSpec:
    """Return how the parties link that take part, by their ranks; None: all."""
    spec = link_spec(config)
    absent = frozenset(absent_names(config, active))
    return replace(spec, roles=replace(spec.roles, absent=absent))
