"""The groups of accounting reference cases, each computed through the public functions.

A case is ``{"id", "group", "inputs", "expect"}``; a group's function turns inputs into named
results, which :mod:`dp.check_vectors` compares with what is expected.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from helpers.discrete_gaussian import (
    discrete_gaussian_epsilon,
    sum_divergence_log,
    summed_renyi_divergence,
)

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.desk.accountants import amplified_epsilon, average_std
from securevfl.dp.accountant import pld_epsilon
from securevfl.dp.budget import Budget
from securevfl.dp.calibration import noise_multiplier_for
from securevfl.dp.events import (
    EntitySampledRelease,
    GaussianRelease,
    Neighbouring,
    SampledRelease,
    Unit,
)
from securevfl.dp.gaussian import gaussian_delta, gaussian_epsilon, gaussian_noise_multiplier
from securevfl.dp.privacy import Privacy
from securevfl.dp.release_plan import ReleasePlan
from securevfl.dp.renyi import rdp_epsilon, renyi_divergence
from securevfl.dp.sensitivity import (
    honest_parties,
    noise_share_std,
    recovery_bound,
    similarity_noise_std,
    sum_sensitivity,
)

Inputs = Mapping[str, Any]
Results = dict[str, float]

_NEIGHBOURING: Final = {
    "add_remove": Neighbouring.ADD_REMOVE,
    "replace_one": Neighbouring.REPLACE_ONE,
}
# adjacency -> unit, neighbouring relation, whether a removed row's release is exactly zero
_ADJACENCIES: Final = {
    "linked_row": (Unit.LINKED_ROW, Neighbouring.ADD_REMOVE, False),
    "linked_row_zero_out": (Unit.LINKED_ROW, Neighbouring.ADD_REMOVE, True),
    "linked_row_replace": (Unit.LINKED_ROW, Neighbouring.REPLACE_ONE, False),
    "linked_row_replace_one": (Unit.LINKED_ROW, Neighbouring.REPLACE_ONE, False),
    "secondary_record": (Unit.SECONDARY_RECORD, Neighbouring.ADD_REMOVE, False),
    "secondary_record_add_remove": (Unit.SECONDARY_RECORD, Neighbouring.ADD_REMOVE, False),
    "secondary_record_replace_one": (Unit.SECONDARY_RECORD, Neighbouring.REPLACE_ONE, False),
    "entity": (Unit.ENTITY, Neighbouring.ADD_REMOVE, False),
    "entity_add_remove": (Unit.ENTITY, Neighbouring.ADD_REMOVE, False),
    "entity_replace_one": (Unit.ENTITY, Neighbouring.REPLACE_ONE, False),
}
_ENCODERS: Final = {
    "frozen": "frozen",
    "trained": "trained",
    "trained_non_privately": "trained",
    "dp_trained": "dp-trained",
    "dp-trained": "dp-trained",
}
_SAMPLINGS: Final = {
    "poisson_fresh_per_step": "per-round",
    "poisson": "per-round",
    "per_epoch_shared": "per-epoch",
    "poisson_per_epoch": "per-epoch",
    "without_replacement": "fixed-size",
    "fixed_size": "fixed-size",
}


def noise_multiplier_of_shares(
    *, share_std: float, sensitivity: float, active: int, colluding: int = 0
) -> float:
    """Return ``z = tau sqrt(k_a - c) / Delta_sum`` (docs/privacy.md, section 3).

    Args:
        share_std: ``tau``, what each party adds to its term of the sum, > 0.
        sensitivity: ``Delta_sum``, L2 sensitivity of the sum, in the same units, > 0.
        active: ``k_a``, >= 1.
        colluding: ``c``, >= 0 and < ``active``.
    """
    checks.positive(share_std=share_std, sensitivity=sensitivity)
    return share_std * math.sqrt(honest_parties(active=active, colluding=colluding)) / sensitivity


def share_std_for_average(
    *, average_noise_std: float, parties: int, colluding: int = 0, divided_terms: bool = False
) -> float:
    """Return what each of ``parties`` adds so that the average keeps ``average_noise_std``.

    Args:
        average_noise_std: Standard deviation that must stay on the average when the colluding
            parties have subtracted their own noise, > 0.
        parties: ``k``, >= 1.
        colluding: ``c``, >= 0 and < ``parties``.
        divided_terms: The noise goes on terms that were divided by k already.

    Returns:
        ``k s / sqrt(k - c)`` before the division, ``s / sqrt(k - c)`` on divided terms.

    Examples:
        >>> share_std_for_average(average_noise_std=1.0, parties=4)
        2.0
        >>> share_std_for_average(average_noise_std=1.0, parties=4, divided_terms=True)
        0.5
    """
    divided = noise_share_std(sum_std=average_noise_std, active=parties, colluding=colluding)
    return divided if divided_terms else parties * divided


# FedSim's two theorems on noisy similarities: a bound on one greedy attacker, and no DP.


def _choice(table: Mapping[str, Any], inputs: Inputs, name: str, default: str) -> Any:
    word = inputs.get(name, default)
    if word not in table:
        near = checks.did_you_mean(word, table)
        raise ConfigError(f"{name} must be one of {', '.join(table)}; got {word!r}{near}")
    return table[word]


def _multiplier(inputs: Inputs) -> float:
    noise, sensitivity = inputs["noise_std"], inputs["sensitivity"]
    checks.positive(noise_std=noise, sensitivity=sensitivity)
    return float(noise / sensitivity)


def _gaussian_epsilon(inputs: Inputs) -> Results:
    z = _multiplier(inputs)
    return {"eps": gaussian_epsilon(delta=inputs["delta"], noise_multiplier=z)}


def _gaussian_delta(inputs: Inputs) -> Results:
    z = _multiplier(inputs)
    return {"delta": gaussian_delta(epsilon=inputs["eps"], noise_multiplier=z)}


def _gaussian_sigma(inputs: Inputs) -> Results:
    checks.positive(sensitivity=inputs["sensitivity"])
    z = gaussian_noise_multiplier(epsilon=inputs["eps"], delta=inputs["delta"])
    return {"noise_std": z * inputs["sensitivity"]}


def _sampled(
    inputs: Inputs, *, rate: str = "q", multiplier: str = "z"
) -> SampledRelease | EntitySampledRelease:
    """Return Poisson-sampled releases, or an entity's at ``k`` parties where that is given."""
    if "k" in inputs:
        return EntitySampledRelease(
            parties=inputs["k"],
            sampling_rate=inputs[rate],
            noise_multiplier=inputs[multiplier],
            count=inputs["steps"],
        )
    return SampledRelease(
        sampling_rate=inputs[rate],
        noise_multiplier=inputs[multiplier],
        count=inputs["steps"],
        neighbouring=_choice(_NEIGHBOURING, inputs, "adjacency", "add_remove"),
    )


def _poisson_pld(inputs: Inputs) -> Results:
    return {"eps": pld_epsilon([_sampled(inputs)], delta=inputs["delta"])}


def _shared_epoch_sample(inputs: Inputs) -> Results:
    """An epoch's B rounds on one sample are one release with sqrt(B) times the change."""
    checks.whole(B=inputs["B"])
    checks.positive(B=inputs["B"], z=inputs["z"])
    shared = {**inputs, "z": inputs["z"] / math.sqrt(inputs["B"]), "steps": inputs["T"]}
    return {"eps": pld_epsilon([_sampled(shared)], delta=inputs["delta"])}


def _phases(inputs: Inputs) -> Results:
    releases = [
        SampledRelease(
            sampling_rate=q,
            noise_multiplier=z,
            count=steps,
            neighbouring=_choice(_NEIGHBOURING, inputs, "adjacency", "add_remove"),
        )
        for q, z, steps in inputs["phases"]
    ]
    return {"eps": pld_epsilon(releases, delta=inputs["delta"])}


def _linked_row_parallel(inputs: Inputs) -> Results:
    """A row is in one batch of an epoch: the others are about other rows."""
    checks.whole(epochs=inputs["epochs"], batches_per_epoch=inputs["batches_per_epoch"])
    checks.positive(sigma=inputs["sigma"])
    budget = Budget(
        steps=inputs["epochs"] * inputs["batches_per_epoch"],
        batches_per_epoch=inputs["batches_per_epoch"],
        unit="linked-row",
        encoder="frozen",
        delta=inputs["delta"],
    )
    _, _, zero = _choice(_ADJACENCIES, inputs, "adjacency", "linked_row_zero_out")
    return {"eps": budget.epsilon(noise_multiplier=inputs["sigma"] / (1 if zero else 2))}


def _calibrate(inputs: Inputs) -> Results:
    neighbouring = _choice(_NEIGHBOURING, inputs, "adjacency", "add_remove")
    multiplier = noise_multiplier_for(
        lambda z: [
            SampledRelease(
                sampling_rate=inputs.get("q", 1.0),
                noise_multiplier=z,
                count=inputs["steps"],
                neighbouring=neighbouring,
            )
        ],
        epsilon=inputs["target_eps"],
        delta=inputs["delta"],
        method=inputs.get("accountant", "auto"),
    )
    return {"noise_multiplier": multiplier}


def _amplify_one_step(inputs: Inputs) -> Results:
    release = _sampled({"steps": 1, **inputs}, multiplier="noise_multiplier")
    return {"eps": pld_epsilon([release], delta=inputs["delta"])}


def _amplify_formula(inputs: Inputs) -> Results:
    return {"eps": amplified_epsilon(epsilon=inputs["eps0"], sampling_rate=inputs["q"])}


def _rdp_value(inputs: Inputs) -> Results:
    release = _sampled({"steps": 1, **inputs}, multiplier="noise_multiplier")
    return {"rdp": renyi_divergence(release, order=inputs["order"])}


def _rdp_epsilon(inputs: Inputs) -> Results:
    release = _sampled(inputs, multiplier="noise_multiplier")
    return {"eps": rdp_epsilon([release], delta=inputs["delta"])}


def _party_noise(inputs: Inputs) -> Results:
    active = inputs.get("k_active", inputs["k"])
    checks.positive(sigma=inputs["sigma"], C=inputs["C"])
    checks.whole(k=inputs["k"], k_active=active)
    if not active <= inputs["k"]:
        raise ConfigError(f"k_active must be at most k = {inputs['k']}, got {active}")
    divided = {"before_division": False, "after_division": True}
    after = _choice(divided, inputs, "convention", "before_division")
    colluding = inputs.get("colluding", 0)
    share = share_std_for_average(
        average_noise_std=inputs["sigma"] * inputs["C"],
        parties=active,
        colluding=colluding,
        divided_terms=after,
    )
    # Noise on divided terms is that of the sum over k; on whole terms the average divides it.
    undivided = share * active if after else share
    honest = honest_parties(active=active, colluding=colluding)
    return {
        "per_party_std": share,
        "released_std": average_std(share_std=undivided, active=active),
        "residual_std_seen_by_coalition": undivided * math.sqrt(honest) / active,
    }


def _noise_multiplier(inputs: Inputs) -> Results:
    unit, neighbouring, zero = _choice(_ADJACENCIES, inputs, "adjacency", "")
    trained = _choice(_ENCODERS, inputs, "encoder", "frozen") == "trained"
    rows = inputs["batch_rows"]
    sensitivity = sum_sensitivity(
        clip_norm=inputs["C"],
        active=inputs["k_active"],
        unit=unit,
        links_per_record=rows if trained else inputs["max_rows_per_record"],
        rows=rows,
        neighbouring=neighbouring,
        absent_row_is_zero=zero and not trained,
    )
    if trained and unit is Unit.LINKED_ROW:
        # A trained encoder's weights carry the row into all others.
        sensitivity *= math.sqrt(rows)
    multiplier = noise_multiplier_of_shares(
        share_std=inputs["per_party_std_before_division"],
        sensitivity=sensitivity,
        active=inputs["k_active"],
        colluding=inputs.get("colluding", 0),
    )
    return {"l2_sensitivity_of_sum": sensitivity, "noise_multiplier": multiplier}


def _trained_encoder(inputs: Inputs) -> Results:
    """A run whose bottom models are trained: every row of every round may change."""
    unit, _, _ = _choice(_ADJACENCIES, inputs, "adjacency", "secondary_record")
    parties, rows, epochs = inputs["k"], inputs["rows"], inputs["epochs"]
    checks.whole(k=parties, rows=rows, epochs=epochs)
    checks.positive(released_std=inputs["released_std"])
    plan = ReleasePlan(
        privacy=Privacy(
            noise_multiplier=1.0,
            delta=inputs["delta"],
            clip_norm=inputs["C"],
            unit=unit.value,
            encoder="trained",
            colluding=inputs.get("colluding", 0),
        ),
        parties=parties,
        min_active=parties,
        rounds=epochs,
        rows_per_round=rows,
        row_releases=epochs * rows,
        releases_per_row=epochs,
        links=1,
    )
    plan.check()
    share_std = inputs["released_std"] * math.sqrt(parties)
    release = plan.release(share_std, rounds=epochs, row_releases=epochs * rows)
    assert isinstance(release, GaussianRelease)
    return {"mu": 1 / release.noise_multiplier, "eps": plan.epsilon(share_std)}


def _link_count(inputs: Inputs) -> Results:
    """A frozen run at a noise multiplier, with the numbers of linked rows that secondaries say."""
    checks.whole_from(1, k=inputs["k"], rows=inputs["rows"])
    checks.positive(noise_multiplier=inputs["noise_multiplier"])
    privacy = Privacy(
        noise_multiplier=inputs["noise_multiplier"],
        delta=inputs["delta"],
        unit=inputs["unit"],
        encoder="frozen",
        links_per_record=inputs["max_rows_per_record"],
    )
    plan = ReleasePlan(
        privacy=privacy,
        parties=inputs["k"],
        min_active=inputs["k"],
        rounds=1,
        rows_per_round=inputs["rows"],
        row_releases=inputs["rows"],
        releases_per_row=1,
        links=1,
        linked_rows=inputs["rows"],
    )
    share_std = plan.noise_share_std()
    return {"eps": plan.epsilon(share_std), "count_std": plan.link_count_std(share_std)}


def _similarity_bound(inputs: Inputs) -> Results:
    return {"tau": recovery_bound(noise_std=inputs["sigma"], key_scale=inputs["sigma0"])}


def _expected_disclosures(inputs: Inputs) -> Results:
    checks.whole_from(0, n=inputs["n"])
    return {"expected": inputs["n"] * _similarity_bound(inputs)["tau"]}


def _similarity_noise(inputs: Inputs) -> Results:
    return {"sigma": similarity_noise_std(bound=inputs["tau"], key_scale=inputs["sigma0"])}


def _sum_divergence(inputs: Inputs) -> Results:
    log_bound = sum_divergence_log(parties=inputs["parties"], ring_std=inputs["per_party_ring_std"])
    return {"log10_tau": log_bound / math.log(10)}


def _summed_rdp(inputs: Inputs) -> Results:
    unit, _, zero = _choice(_ADJACENCIES, inputs, "adjacency", "")
    parties, releases = inputs["parties"], inputs.get("releases", 1)
    checks.positive(sigma=inputs["sigma"], C=inputs["C"])
    checks.whole(granularity_bits=inputs["granularity_bits"], releases=releases)
    checks.at_least(0, granularity_bits=inputs["granularity_bits"], releases=releases)
    sensitivity = sum_sensitivity(
        clip_norm=inputs["C"],
        active=parties,
        unit=unit,
        links_per_record=inputs.get("max_rows_per_record", 1),
        rows=inputs.get("batch_rows", 1),
        neighbouring=_choice(_ADJACENCIES, inputs, "adjacency", "")[1],
        absent_row_is_zero=zero,
    )
    divergence = summed_renyi_divergence(
        order=inputs["order"],
        sensitivity=sensitivity,
        parties=parties,
        share_std=share_std_for_average(
            average_noise_std=inputs["sigma"] * inputs["C"], parties=parties
        ),
        granularity=2.0 ** -inputs["granularity_bits"],
        dimension=inputs["dim"],
    )
    return {"rdp": releases * divergence}


def _discrete_gaussian(inputs: Inputs) -> Results:
    epsilon = discrete_gaussian_epsilon(
        shift=inputs["shift"], ring_std=inputs["ring_sigma"], delta=inputs["delta"]
    )
    return {"eps": epsilon}


# Names of a whole plan's inputs -> the calculator's.
_PLAN_FIELDS: Final = {
    "steps": "steps",
    "delta": "delta",
    "q": "sampling_rate",
    "max_rows_per_record": "links_per_record",
    "k": "secondaries",
    "colluding": "colluding",
    "C": "clip_norm",
    "batch_rows": "batch_rows",
    "batches_per_epoch": "batches_per_epoch",
    "sampling_secret": "sampling_secret",
    "batch_norm": "rows_mix",
    "accountant": "accountant",
}
_PLAN_WORDS: Final = frozenset(("sigma", "target_eps", "adjacency", "encoder", "sampling"))


def _invalid(inputs: Inputs) -> Results:
    """A whole plan, some part of which is impossible or unsound."""
    unknown = sorted(set(inputs) - set(_PLAN_FIELDS) - _PLAN_WORDS)
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such field of a plan")
    unit, neighbouring, _ = _choice(_ADJACENCIES, inputs, "adjacency", "secondary_record")
    budget = Budget(
        **{_PLAN_FIELDS[name]: inputs[name] for name in _PLAN_FIELDS if name in inputs},
        unit=unit.value,
        encoder=_choice(_ENCODERS, inputs, "encoder", "frozen"),
        sampling=_choice(_SAMPLINGS, inputs, "sampling", "poisson_fresh_per_step"),
        neighbouring=neighbouring.value,
    )
    if "target_eps" in inputs:
        return {"noise_multiplier": budget.noise_multiplier(epsilon=inputs["target_eps"])}
    return {"eps": budget.epsilon(noise_multiplier=inputs["sigma"])}


GROUPS: Final[Mapping[str, Callable[[Inputs], Results]]] = {
    "gaussian_eps": _gaussian_epsilon,
    "gaussian_delta": _gaussian_delta,
    "gaussian_sigma": _gaussian_sigma,
    "poisson_pld": _poisson_pld,
    "poisson_pld_replace": _poisson_pld,
    "entity_mog": _poisson_pld,
    "shared_epoch_sample": _shared_epoch_sample,
    "heterogeneous_pld": _phases,
    "linked_row_parallel": _linked_row_parallel,
    "calibrate_z": _calibrate,
    "amplify_one_step": _amplify_one_step,
    "amplify_formula": _amplify_formula,
    "rdp_value": _rdp_value,
    "rdp_eps": _rdp_epsilon,
    "party_noise": _party_noise,
    "noise_multiplier": _noise_multiplier,
    "stateful_encoder": _trained_encoder,
    "link_count": _link_count,
    "fedsim_tau": _similarity_bound,
    "fedsim_expected_disclosures": _expected_disclosures,
    "fedsim_sigma_inverse": _similarity_noise,
    "ddg_log10_tau": _sum_divergence,
    "ddg_rdp": _summed_rdp,
    "discrete_gaussian_1d": _discrete_gaussian,
    "invalid": _invalid,
}
