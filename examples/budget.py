"""The budget calculator: what a secret sample of the records saves at epsilon 8.

With a sampling rate q every round links a fresh secret sample of each secondary's records. An
observer does not know whether a record took part, so the same epsilon needs less noise (or buys
more rounds). A round then averages fewer records: noise over q says what is left of the gain. It
stays level down to q = 0.1, so rounds become cheaper, and it grows below.

Run: ``python examples/budget.py [--out sampling.svg]``, which draws the noise and prints::

    epsilon 8, 1000 rounds, a dp-trained encoder, four secondaries
    sampling rate   noise   noise / rate   rounds that noise 4 allows
                1   26.84           26.8                           22
              0.5   13.48           27.0                           81
              0.2    5.50           27.5                          507
              0.1    2.90           29.0                        2,050
             0.05    1.68           33.7                        8,264
             0.02    1.04           51.9                       51,916
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

import securevfl as sv

EPSILON = 8.0
ROUNDS = 1000
RATES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)


def main(arguments: list[str] | None = None) -> dict[float, float]:
    """Print and draw the noise of every sampling rate, and return it."""
    parser = argparse.ArgumentParser(description="What sampling saves at equal epsilon.")
    parser.add_argument("--out", type=Path, default=Path("sampling.svg"), help="the plot")
    options = parser.parse_args(arguments)
    print(f"epsilon {EPSILON:g}, {ROUNDS} rounds, a dp-trained encoder, four secondaries")
    print("sampling rate   noise   noise / rate   rounds that noise 4 allows")
    noise = {}
    for rate in RATES:
        budget = sv.dp.Budget(
            steps=ROUNDS,
            delta=1e-5,
            sampling_rate=rate,
            encoder="dp-trained",
            links_per_record=1,
            secondaries=4,
        )
        noise[rate] = budget.noise_multiplier(epsilon=EPSILON)
        allowed = budget.steps_within(epsilon=EPSILON, noise_multiplier=4.0)
        print(f"{rate:13g} {noise[rate]:7.2f} {noise[rate] / rate:14.1f} {allowed:28,}")

    figure, axes = plt.subplots()
    axes.plot(RATES, list(noise.values()), marker="o", label="noise")
    scaled = [one / rate for rate, one in noise.items()]
    axes.plot(RATES, scaled, marker="s", label="noise / rate")
    axes.set_xlabel("sampling rate q")
    axes.set_ylabel("noise multiplier of a round")
    axes.set_title(f"epsilon {EPSILON:g} over {ROUNDS} rounds")
    axes.legend()
    figure.savefig(options.out)
    plt.close(figure)
    return noise


if __name__ == "__main__":
    main()
