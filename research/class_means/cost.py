"""What class sums under masks cost a secondary: ``python research/class_means/cost.py``.

CPU time of each party's arithmetic, and the bytes of the masked vectors; the median of the repeats.
Nothing is sent: what travels besides is 16 bytes a row and what TLS adds.
"""

import argparse
import time
from statistics import median

import numpy as np

from securevfl.mpc.dealt_sums import (
    DealtFor,
    deal,
    mask_vectors,
    masked_noise,
    open_sums,
    shift_bins,
)

SIZES = {
    "digits, 5 parties": (1_797, 10, 16),
    "mfeat, a projected view": (2_000, 10, 24),
    "MNIST, 28 columns": (6_000, 10, 28),
    "100,000 rows": (100_000, 10, 24),
}
"""Rows, classes and a record's numbers."""


def main() -> None:
    """Print one line a size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print("| sums | rows | dealer s | secondary s | primary s | masked MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, size in SIZES.items():
        taken = np.array([turn(*size) for _ in range(repeats)])
        dealer, secondary, primary, sent = (median(column) for column in taken.T)
        print(
            f"| {name} | {size[0]:,} | {dealer:.3f} | {secondary:.3f} | {primary:.3f} | "
            f"{sent / 1e6:.1f} |"
        )


def turn(rows: int, classes: int, features: int) -> tuple[float, float, float, float]:
    """Return the CPU seconds of dealer, secondary and primary, and the masked vectors' bytes."""
    random = np.random.default_rng(0)
    bins, numbers = classes + 1, features + 1
    bins_of_rows = random.integers(0, bins, rows)
    vectors = random.integers(-(10**5), 10**5, (rows, numbers))
    noise = random.integers(-99, 99, (bins, numbers))
    marks = [time.process_time()]
    what = DealtFor(run="cost", secondary=1, rows=rows, bins=bins, numbers=numbers)
    dealing, seed = deal(what)
    marks.append(time.process_time())
    said = shift_bins(bins_of_rows, dealing.shifts, bins=bins)
    shifting = time.process_time() - marks[-1]
    pieces = list(mask_vectors(vectors, said, seed, what))
    hidden = masked_noise(noise, seed, what)
    marks.append(time.process_time())
    open_sums(pieces, hidden, dealing)
    marks.append(time.process_time())
    dealer, secondary, primary = np.diff(marks)
    sent = sum(piece.nbytes for piece in pieces)
    return float(dealer), float(secondary - shifting), float(primary + shifting), float(sent)


if __name__ == "__main__":
    main()
