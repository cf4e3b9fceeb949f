"""Make accounting.json: reference cases of sampled Gaussian accounting, by contour integration.

Shares no code with securevfl, nor with dp-accounting. Method: with K(s) = log E[exp(s L)] of one
release's privacy loss L under the distribution with the unit, and any c > 0,

    delta(epsilon) = (1 / 2 pi i) integral of exp(T K(s) - s epsilon) / (s (s + 1)) ds, Re s = c,

taken through the saddle point, where the integrand does not oscillate. Both the moments and the
line integral are trapezoidal sums of analytic functions, whose error falls exponentially.
Closed forms come from mpmath with 50 digits. For delta from 1e-8 to 1e-7 the result is
taken between two deltas of the same integral in mpmath with 30 digits, and Renyi divergences come
from mpmath's own quadrature. Run: python tests/vectors/make_accounting.py (about two minutes)
"""

import json
import math
from pathlib import Path

import mpmath
import numpy as np
from scipy.optimize import brentq, minimize_scalar

mpmath.mp.dps = 50


def mixture(q: float, parties: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and shifts of the sampled release."""
    drawn = np.arange(parties + 1)
    weights = np.array(
        [math.comb(parties, int(j)) * q**j * (1 - q) ** (parties - j) for j in drawn]
    )
    return weights, drawn / parties


def losses(q: float, z: float, parties: int, direction: str) -> tuple[np.ndarray, np.ndarray]:
    """Return quadrature nodes' privacy losses and log-masses under the upper distribution."""
    weights, shifts = mixture(q, parties)
    step = min(0.05, z / 8)
    x = np.arange(-30, 30 + 8 / z, step)  # in units of the noise
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights)
    terms = log_weights[:, None] + shifts[:, None] * x / z - (shifts**2 / (2 * z * z))[:, None]
    top = terms.max(axis=0)
    log_ratio = top + np.log(np.exp(terms - top).sum(axis=0))
    base = -x * x / 2 - 0.5 * math.log(2 * math.pi) + math.log(step)
    if direction == "remove":
        return log_ratio, base + log_ratio
    return -log_ratio, base


def log_delta(epsilon: float, phases: list, direction: str) -> float:
    """Return log delta(epsilon) of the composition of phases (q, z, count, parties)."""
    nodes = [(*losses(q, z, parties, direction), count) for q, z, count, parties in phases]

    def exponent(c: float) -> float:
        total = -c * epsilon - math.log(c * (c + 1))
        for loss, mass, count in nodes:
            term = mass + c * loss
            top = term.max()
            total += count * (top + math.log(np.exp(term - top).sum()))
        return total

    found = minimize_scalar(
        lambda log_c: exponent(math.exp(log_c)),
        bounds=(-9, 9),
        method="bounded",
        options={"xatol": 1e-10},
    )
    c = math.exp(found.x)
    peak = exponent(c)
    curvature = 1 / c**2 + 1 / (c + 1) ** 2
    for loss, mass, count in nodes:
        tilted = np.exp(mass + c * loss - (mass + c * loss).max())
        tilted /= tilted.sum()
        mean = (tilted * loss).sum()
        curvature += count * (tilted * (loss - mean) ** 2).sum()
    # The pole at 0 is c away: the trapezoidal rule's error is exp(-2 pi c / step).
    step = min(0.1 / math.sqrt(curvature), c / 5)
    total, start = 0.5 * math.exp(0), 1
    while True:
        s = c + 1j * step * np.arange(start, start + 200)
        values = -s * epsilon - np.log(s * (s + 1))
        for loss, mass, count in nodes:
            top = (mass + c * loss).max()
            keep = mass + c * loss > top - 45
            moment = np.exp(1j * np.outer(s.imag, loss[keep])) @ np.exp(
                mass[keep] + c * loss[keep] - top
            )
            # The branch is immaterial: exp() of an integer count forgets multiples of 2 pi i.
            values = values + count * (top + np.log(moment))
        part = np.exp(values - peak)
        total += part.real.sum()
        if np.abs(part).sum() < 1e-13 * abs(total):
            break
        start += 200
        assert start < 200_000, "the integrand does not decay"
    return peak + math.log(2 * total * step / (2 * math.pi))


def epsilon_at(delta: float, phases: list) -> float:
    """Return the larger epsilon of the two directions."""
    found = []
    for direction in ("remove", "add"):

        def excess(epsilon: float, direction: str = direction) -> float:
            return log_delta(epsilon, phases, direction) - math.log(delta)

        high = 1.0
        while excess(high) > 0:
            high *= 2
        found.append(brentq(excess, 1e-6, high, xtol=1e-11) if excess(1e-6) > 0 else 0.0)
    return max(found)


def gaussian_delta(z: str, epsilon: str) -> mpmath.mpf:
    """[BW18] Theorem 8 with 50 digits."""
    z, epsilon = mpmath.mpf(z), mpmath.mpf(epsilon)
    return mpmath.ncdf(1 / (2 * z) - epsilon * z) - mpmath.exp(epsilon) * mpmath.ncdf(
        -1 / (2 * z) - epsilon * z
    )


SAMPLED = [
    # q, z, steps, delta: small and large rates, few and many steps, little noise
    (0.001, 0.5, 2000, 1e-5),
    (0.001, 0.8, 100_000, 1e-6),
    (0.0001, 0.6, 50_000, 1e-7),
    (0.02, 0.5, 50, 1e-5),
    (0.9, 3.0, 40, 1e-5),
    (0.5, 1.0, 12, 1e-6),
    (0.3, 10.0, 1_000_000, 1e-5),
    (0.005, 3.0, 1_000_000, 1e-6),
    (0.2, 30.0, 500, 1e-8),
    (0.05, 1.2, 20, 1e-10),
]
ENTITY = [(2, 0.3, 1.5, 30, 1e-5), (5, 0.01, 1.0, 3000, 1e-6), (20, 0.2, 5.0, 100, 1e-5)]
PHASES = [
    ([[0.01, 1.0, 500], [0.3, 8.0, 50], [1.0, 12.0, 3]], 1e-5),
    ([[0.5, 6.0, 20], [0.001, 0.7, 4000]], 1e-6),
]
CURVE = [("0.05", "300"), ("0.5", "3"), ("1", "0.01"), ("4", "0.3"), ("20", "1"), ("1", "12")]


def root(falling) -> mpmath.mpf:
    """Return where a falling function is zero, by halving with 50 digits."""
    low, high = mpmath.mpf("1e-6"), mpmath.mpf(1)
    while falling(high) > 0:
        low, high = high, 2 * high
    for _ in range(120):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high


def closed_forms() -> list[dict]:
    """Return cases of the groups that have a formula, by mpmath with 50 digits."""
    return [*curves(), *bounds(), *noise_of_parties()]


def case_of(group: str, inputs: dict, **expect) -> dict:
    """Return a case, its figures rounded to float64."""
    numbers = {name: float(x) if isinstance(x, mpmath.mpf) else x for name, x in expect.items()}
    return {"group": group, "inputs": inputs, "expect": numbers}


mpf, sqrt, log = mpmath.mpf, mpmath.sqrt, mpmath.log
TIGHT = {"rel_tol": 1e-9}
UPWARD = {"rel_tol_low": 1e-12, "rel_tol_high": 1e-6}


def curves():
    """Yield cases of Gaussian curves and of one sampled release."""
    for z, delta in (("0.3", "1e-5"), ("5", "1e-9"), ("80", "1e-6")):
        epsilon = root(lambda e, z=z, delta=delta: gaussian_delta(z, e) - mpf(delta))
        inputs = {"sensitivity": 2.0, "noise_std": 2 * float(z), "delta": float(delta)}
        yield case_of("gaussian_eps", inputs, eps=epsilon, **UPWARD)
    for epsilon, delta in (("0.1", "1e-7"), ("30", "1e-5")):
        z = root(lambda z, e=epsilon, delta=delta: gaussian_delta(z, e) - mpf(delta))
        inputs = {"sensitivity": 3.0, "eps": float(epsilon), "delta": float(delta)}
        yield case_of("gaussian_sigma", inputs, noise_std=3 * z, **UPWARD)
    for epsilon, q in (("0", "0.3"), ("12", "0.001"), ("800", "0.5")):
        amplified = mpmath.log(1 + mpf(q) * mpmath.expm1(mpf(epsilon)))
        yield case_of(
            "amplify_formula", {"eps0": float(epsilon), "q": float(q)}, eps=amplified, **TIGHT
        )
    for z, q, delta in (("1.5", "0.02", "1e-6"), ("0.8", "0.6", "1e-5")):
        share = mpf(delta) / mpf(q)
        whole = root(lambda e, z=z, share=share: gaussian_delta(z, e) - share)
        amplified = mpmath.log(1 + mpf(q) * mpmath.expm1(whole))
        inputs = {"noise_multiplier": float(z), "q": float(q), "steps": 1, "delta": float(delta)}
        yield case_of(
            "amplify_one_step", inputs, eps=amplified, abs_tol_low=1e-9, abs_tol_high=1e-3
        )
    for q, z, order in ((0.02, 1.1, 3), (0.7, 2.5, 6)):
        moment = mpmath.fsum(
            mpmath.binomial(order, j)
            * mpf(q) ** j
            * (1 - mpf(q)) ** (order - j)
            * mpmath.exp(mpf(j * (j - 1)) / (2 * mpf(z) ** 2))
            for j in range(order + 1)
        )
        inputs = {"q": q, "noise_multiplier": z, "order": order}
        yield case_of("rdp_value", inputs, rdp=mpmath.log(moment) / (order - 1), **TIGHT)


def bounds():
    """Yield cases of FedSim's tau and of sums of discrete Gaussians."""
    for sigma, scale in (("0.05", "3"), ("7", "250")):
        tau = mpmath.erf(sqrt(mpf(sigma) ** 2 + 1) / (2 * sqrt(mpf(2)) * mpf(sigma) * mpf(scale)))
        inputs = {"sigma": float(sigma), "sigma0": float(scale)}
        yield case_of("fedsim_tau", inputs, tau=tau, **TIGHT)
        yield case_of(
            "fedsim_expected_disclosures", {**inputs, "n": 5000}, expected=5000 * tau, **TIGHT
        )
    for sigma, scale in (("0.2", "40"), ("1.5", "9")):
        # The bound is given in float64: what it inverts to is found for that number.
        tau = float(
            mpmath.erf(sqrt(mpf(sigma) ** 2 + 1) / (2 * sqrt(mpf(2)) * mpf(sigma) * mpf(scale)))
        )
        y = 2 * sqrt(mpf(2)) * mpf(scale) * mpmath.erfinv(mpf(tau))
        inputs = {"tau": tau, "sigma0": float(scale)}
        yield case_of("fedsim_sigma_inverse", inputs, sigma=1 / sqrt(y * y - 1), **TIGHT)
    for parties, units in ((3, "0.8"), (12, "2.5")):
        terms = (
            mpmath.exp(-2 * mpmath.pi**2 * mpf(units) ** 2 * j / (j + 1)) for j in range(1, parties)
        )
        inputs = {"parties": parties, "per_party_ring_std": float(units)}
        yield case_of(
            "ddg_log10_tau", inputs, log10_tau=mpmath.log10(10 * mpmath.fsum(terms)), **TIGHT
        )


def noise_of_parties():
    """Yield cases of noise shares, sensitivities and trained encoders."""
    for k, active, colluding in ((5, 5, 0), (9, 6, 2)):
        # k s / sqrt(k - c) before the division leaves k s sqrt(k) / (k sqrt(k - c)).
        share = active * mpf("0.6") * 3 / sqrt(mpf(active - colluding))
        inputs = {"k": k, "k_active": active, "C": 3.0, "sigma": 0.6, "colluding": colluding}
        yield case_of(
            "party_noise",
            {**inputs, "convention": "before_division"},
            per_party_std=share,
            released_std=share / sqrt(mpf(active)),
            residual_std_seen_by_coalition=mpf("0.6") * 3,
            **TIGHT,
        )
    for adjacency, factor, rows in (
        ("secondary_record_add_remove", 1, 5),
        ("secondary_record_replace_one", 1, 10),
        ("entity_add_remove", 6, 5),
    ):
        change = 2 * mpf("1.5") * factor * sqrt(mpf(rows))
        inputs = {"adjacency": adjacency, "k_active": 6, "C": 1.5, "colluding": 1, "batch_rows": 64}
        inputs |= {"per_party_std_before_division": 7.0, "max_rows_per_record": 5}
        multiplier = 7 * sqrt(mpf(5)) / change
        yield case_of(
            "noise_multiplier",
            {**inputs, "encoder": "frozen"},
            l2_sensitivity_of_sum=change,
            noise_multiplier=multiplier,
            **TIGHT,
        )
    for adjacency, factor in (("secondary_record", 1), ("entity", 3), ("linked_row", 3)):
        # mu = 2 C sqrt(T n) / (k s), and k times that for what every secondary holds.
        mu = 2 * mpf("0.5") * factor * sqrt(mpf(4 * 900)) / (3 * mpf(200))
        epsilon = root(lambda e, mu=mu: gaussian_delta(1 / mu, e) - mpf("1e-5"))
        inputs = {"adjacency": adjacency, "k": 3, "C": 0.5, "released_std": 200.0, "epochs": 4}
        inputs |= {"sigma": 400.0, "rows": 900, "delta": 1e-5, "encoder": "trained_non_privately"}
        yield case_of(
            "stateful_encoder", inputs, mu=mu, eps=epsilon, abs_tol_low=1e-9, abs_tol_high=1e-5
        )


def link_counts():
    """Yield cases of the numbers of linked rows: ten times the run's multiplier, composed.

    Each of a answers that a unit is in has deviation 10 sqrt(a) z times what the unit moves it by.
    """
    for unit, k, cap, change in (
        ("secondary-record", 3, 2, 2),
        ("entity", 3, 2, 2),
        ("linked-row", 4, 2, 1),
        ("secondary-record", 1, 900, 500),
    ):
        z, answers = mpf("0.8"), 1 if unit == "secondary-record" else k
        mu = sqrt(1 / z**2 + answers / (10 * sqrt(mpf(answers)) * z) ** 2)
        epsilon = root(lambda e, mu=mu: gaussian_delta(1 / mu, e) - mpf("1e-5"))
        inputs = {"noise_multiplier": 0.8, "unit": unit, "k": k, "rows": 500, "delta": 1e-5}
        yield case_of(
            "link_count",
            {**inputs, "max_rows_per_record": cap},
            eps=epsilon,
            count_std=10 * sqrt(mpf(answers)) * z * change,
            **UPWARD,
        )


def renyi(q: float, z: float, parties: int, order: float, direction: str) -> mpf:
    """Return a sampled release's Renyi divergence, by mpmath's quadrature of short pieces."""
    q, z, order = mpf(q), mpf(z), mpf(order)
    weights = [
        mpmath.binomial(parties, j) * q**j * (1 - q) ** (parties - j) for j in range(parties + 1)
    ]
    shifts = [mpf(j) / parties for j in range(parties + 1)]
    power = order if direction == "remove" else 1 - order

    def excess(x: mpf) -> mpf:
        ratio = mpmath.fsum(
            w * mpmath.exp(s * x / z - s * s / (2 * z * z))
            for w, s in zip(weights, shifts, strict=True)
        )
        return mpmath.npdf(x) * (ratio**power - 1)

    low, high = min(power, 0) / z - 16, max(power, 0) / z + 16
    width = min(mpf(2), 3 * z)
    edges = [low + width * i for i in range(int((high - low) / width) + 2)]
    with mpmath.workdps(30):
        return mpmath.log1p(mpmath.quad(excess, edges)) / (order - 1)


def precise_delta(epsilon: mpf, q: float, z: float, steps: int, parties: int, way: str) -> mpf:
    """Return delta(epsilon) by the contour integral above, all of it in mpmath with 30 digits."""
    with mpmath.workdps(30):
        q, z = mpf(q), mpf(z)
        nodes = []
        step = mpf(min(0.125, float(z) / 4))
        for i in range(int(-16 / step), int((16 + 6 / z) / step)):
            x = i * step
            ratio = mpmath.fsum(
                mpmath.binomial(parties, j)
                * q**j
                * (1 - q) ** (parties - j)
                * mpmath.exp(mpf(j) / parties * x / z - (mpf(j) / parties / z) ** 2 / 2)
                for j in range(parties + 1)
            )
            mass = mpmath.npdf(x) * step
            nodes.append((log(ratio), mass * ratio) if way == "remove" else (-log(ratio), mass))

        def cumulants(c: mpf) -> tuple[mpf, mpf, mpf]:
            terms = [(loss, mass * mpmath.exp(c * loss)) for loss, mass in nodes]
            total = mpmath.fsum(term for _, term in terms)
            mean = mpmath.fsum(loss * term for loss, term in terms) / total
            square = mpmath.fsum(loss * loss * term for loss, term in terms) / total
            return log(total), mean, square - mean * mean

        # The saddle point, where the exponent's derivative vanishes, by halving.
        low, high = mpf("1e-3"), mpf("1e4")
        for _ in range(40):
            c = sqrt(low * high)
            slope = steps * cumulants(c)[1] - epsilon - 1 / c - 1 / (c + 1)
            low, high = (c, high) if slope < 0 else (low, c)
        curvature = steps * cumulants(c)[2] + 1 / c**2 + 1 / (c + 1) ** 2
        spacing = min(mpf("0.25") / sqrt(curvature), c / 8)
        total, index = mpf(0), 0
        while True:
            at = mpmath.mpc(c, spacing * index)
            moment = mpmath.fsum(mass * mpmath.exp(at * loss) for loss, mass in nodes)
            term = (moment**steps * mpmath.exp(-at * epsilon) / (at * (at + 1))).real
            total += term / 2 if index == 0 else term
            index += 1
            if index > 8 and abs(term) < mpf("1e-16") * abs(total):
                return total * spacing / mpmath.pi


def precise_epsilon(q: float, z: float, steps: int, parties: int, delta: float) -> float:
    """Return epsilon at delta, right to one part in 1e8: between two that are not and that are."""
    epsilon = epsilon_at(delta, [(q, z, steps, parties)])
    below, above = (mpf(epsilon) * (1 + sign * mpf("1e-8")) for sign in (-1, 1))
    args = (q, z, steps, parties)
    assert max(precise_delta(below, *args, way) for way in ("remove", "add")) > delta
    assert max(precise_delta(above, *args, way) for way in ("remove", "add")) < delta
    return epsilon


# The rates, multipliers and rounds that plans at so small a delta have, and orders at which one
# release's moment is next to one while the loss is large far out.
SMALL_DELTA = [
    # q, z, steps, parties, delta
    (0.003, 4.0, 1_000_000, 1, 5e-8),
    (0.003, 8.0, 1_000_000, 1, 1e-8),
    (0.003, 2.0, 100_000, 1, 2e-8),
    (0.003, 10.0, 100_000, 1, 9e-8),
    (0.003, 4.0, 10_000, 1, 5e-8),
    (0.002, 1.0, 10_000, 1, 1e-8),
    (0.001, 6.34, 100_000, 1, 5e-8),
    (0.001, 4.58, 100_000, 1, 1e-8),
    (0.001, 1.0, 1_000_000, 1, 9e-8),
    (0.0003, 2.0, 1_000_000, 1, 2e-8),
    (0.0001, 1.0, 1_000_000, 1, 5e-8),
    (0.02, 8.0, 10_000, 2, 5e-8),
    (0.003, 2.0, 100_000, 2, 2e-8),
    (0.003, 4.0, 1_000_000, 4, 9e-8),
    (0.001, 2.0, 1_000_000, 4, 1e-8),
    (0.003, 1.0, 100_000, 8, 5e-8),
    (0.001, 1.0, 1_000_000, 8, 2e-8),
]
ORDERS = [
    # q, z, parties, order
    (0.003, 4.0, 1, 90.3),
    (0.003, 10.0, 1, 640.0),
    (0.001, 8.0, 1, 700.5),
    (1e-6, 20.0, 1, 4000.5),
    (0.001, 0.05, 1, 1.25),
    (0.9, 0.3, 1, 17.5),
    (0.003, 2.0, 4, 37.5),
    (0.001, 4.0, 16, 150.25),
    (0.5, 1.5, 2, 9.5),
]
CALIBRATED = [(0.003, 10_000, 0.1, 5e-8), (0.001, 100_000, 0.2, 2e-8), (0.002, 20_000, 1.0, 1e-8)]


def small_deltas() -> list[dict]:
    """Return cases of Renyi accounting where it is all there is: delta from 1e-8 to 1e-7."""
    made = []
    for q, z, steps, parties, delta in SMALL_DELTA:
        inputs = {"q": q, "noise_multiplier": z, "steps": steps, "delta": delta}
        inputs |= {"k": parties} if parties > 1 else {}
        # Renyi's epsilon lies a few per cent above the true one.
        epsilon = precise_epsilon(q, z, steps, parties, delta)
        made.append(case_of("rdp_eps", inputs, eps=epsilon, rel_tol_low=0.0, rel_tol_high=0.6))
    for q, z, parties, order in ORDERS:
        inputs = {"q": q, "noise_multiplier": z, "order": order}
        inputs |= {"k": parties} if parties > 1 else {}
        divergence = max(renyi(q, z, parties, order, way) for way in ("remove", "add"))
        made.append(
            case_of("rdp_value", inputs, rdp=divergence, rel_tol_low=0.0, rel_tol_high=1e-8)
        )
    for q, steps, epsilon, delta in CALIBRATED:
        least = brentq(
            lambda z, q=q, steps=steps, epsilon=epsilon, delta=delta: (
                log_delta(epsilon, [(q, z, steps, 1)], "remove") - math.log(delta)
            ),
            1.0,
            30.0,
            xtol=1e-9,
        )
        assert precise_delta(mpf(epsilon), q, least * (1 - 1e-7), steps, 1, "remove") > delta
        assert all(
            precise_delta(mpf(epsilon), q, least * (1 + 1e-7), steps, 1, way) < delta
            for way in ("remove", "add")
        )
        inputs = {"q": q, "steps": steps, "target_eps": epsilon, "delta": delta}
        made.append(
            case_of(
                "calibrate_z", inputs, noise_multiplier=least, rel_tol_low=0.0, rel_tol_high=0.15
            )
        )
    return made


def cases() -> list[dict]:
    """Return all cases."""
    made = []
    tolerance = {"abs_tol_low": 1e-6}
    for q, z, steps, delta in SAMPLED:
        epsilon = epsilon_at(delta, [(q, z, steps, 1)])
        made.append(
            {
                "group": "poisson_pld",
                "inputs": {"q": q, "z": z, "steps": steps, "delta": delta},
                "expect": {"eps": epsilon, **tolerance, "abs_tol_high": max(1e-3, 2e-3 * epsilon)},
            }
        )
    for parties, q, z, steps, delta in ENTITY:
        epsilon = epsilon_at(delta, [(q, z, steps, parties)])
        made.append(
            {
                "group": "entity_mog",
                "inputs": {"k": parties, "q": q, "z": z, "steps": steps, "delta": delta},
                "expect": {"eps": epsilon, **tolerance, "abs_tol_high": max(1e-3, 2e-3 * epsilon)},
            }
        )
    for phases, delta in PHASES:
        epsilon = epsilon_at(delta, [(q, z, steps, 1) for q, z, steps in phases])
        made.append(
            {
                "group": "heterogeneous_pld",
                "inputs": {"phases": phases, "delta": delta},
                "expect": {"eps": epsilon, **tolerance, "abs_tol_high": max(1e-3, 2e-3 * epsilon)},
            }
        )
    for z, epsilon in CURVE:
        made.append(
            {
                "group": "gaussian_delta",
                "inputs": {"sensitivity": 1.0, "noise_std": float(z), "eps": float(epsilon)},
                "expect": {
                    "delta": float(gaussian_delta(z, epsilon)),
                    "rel_tol_low": 0.0,
                    "rel_tol_high": 1e-6,
                },
            }
        )
    for epochs, batches, sigma, delta in ((10, 14, 4.0, 1e-5), (1, 100, 1.0, 1e-6)):
        root = mpmath.sqrt(epochs) / mpmath.mpf(sigma)
        epsilon = mpmath.findroot(
            lambda e, root=root, delta=delta: gaussian_delta(1 / root, e) - delta, 3
        )
        made.append(
            {
                "group": "linked_row_parallel",
                "inputs": {
                    "sigma": sigma,
                    "epochs": epochs,
                    "batches_per_epoch": batches,
                    "delta": delta,
                },
                "expect": {"eps": float(epsilon), "abs_tol_low": 1e-9, "abs_tol_high": 1e-6},
            }
        )
    made += closed_forms()
    made += small_deltas()
    made += link_counts()
    for number, case in enumerate(made):
        case["id"] = f"own-{case['group']}-{number:02d}"
    return made


def main() -> None:
    """Write the file beside this script."""
    content = {
        "source": "contour integration in float64; closed forms (50 digits), contour integration "
        "below delta = 1e-7 (30 digits) and Renyi quadrature (30 digits) in mpmath",
        "made_by": "tests/vectors/make_accounting.py",
        "cases": cases(),
    }
    path = Path(__file__).with_name("accounting.json")
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
