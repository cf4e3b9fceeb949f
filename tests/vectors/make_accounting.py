"""Make accounting.json: reference cases of sampled Gaussian accounting, by contour integration.

Shares no code with securevfl, nor with dp-accounting. Method: with K(s) = log E[exp(s L)] of one
release's privacy loss L under the distribution with the unit, and any c > 0,

    delta(epsilon) = (1 / 2 pi i) integral of exp(T K(s) - s epsilon) / (s (s + 1)) ds, Re s = c,

taken through the saddle point, where the integrand does not oscillate. Both the moments and the
line integral are trapezoidal sums of analytic functions, whose error falls exponentially.
Closed forms come from mpmath with 50 digits. Run: python tests/vectors/make_accounting.py
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
    for number, case in enumerate(made):
        case["id"] = f"own-{case['group']}-{number:02d}"
    return made


def main() -> None:
    """Write the file beside this script."""
    content = {
        "source": "contour integration in float64 and closed forms in mpmath, 50 digits",
        "made_by": "tests/vectors/make_accounting.py",
        "cases": cases(),
    }
    path = Path(__file__).with_name("accounting.json")
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
