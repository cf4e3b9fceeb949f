"""A secret-shared correlation: two parties' columns stay where they are, and one learns r.

A clinic has the hours that people slept, a laboratory their reaction times, row by row of the same
people. Each runs this program in its own process. Columns are shared, multiplied and added up as
shares under CrypTen, over mutual TLS; a third party deals the randomness of multiplications and
sees no share. What is opened is one number, to the clinic alone.

Run: ``python examples/secret_correlation.py``, which prints::

    clinic: the correlation is -0.821 (in clear it would be -0.821)
    laboratory: learned nothing
"""

from typing import Any

import numpy as np
import pandas as pd

import securevfl as sv
from securevfl.mpc import crypten


def program(party: sv.mpc.ProgramParty) -> float | None:
    """Run at both parties; return the correlation at the clinic, and None elsewhere."""

    def shared(owner: str, name: str) -> Any:
        """Share a column that its owner has brought to mean 0 and deviation 1."""
        column = party.column(name, of=owner)
        centred = column - column.mean()
        deviation = centred.square().mean().sqrt().clamp_min(1e-9)
        return crypten.cryptensor(centred / deviation, src=party.names.index(owner))

    product = shared("clinic", "hours").dot(shared("laboratory", "reaction_ms"))
    opened = product.get_plain_text(dst=party.names.index("clinic"))
    return None if opened is None else float(opened) / len(party.table)


def main(rows: int = 500) -> dict[str, Any]:
    """Make two tables up, and run the program between their parties."""
    random = np.random.default_rng(0)
    hours = random.normal(7, 1, rows)
    reaction = 400 - 40 * hours + random.normal(0, 30, rows)
    tables = {
        "clinic": pd.DataFrame({"hours": hours}),
        "laboratory": pd.DataFrame({"reaction_ms": reaction}),
    }
    results = sv.mpc.run(tables, program)
    clear = float(np.corrcoef(hours, reaction)[0, 1])
    print(f"clinic: the correlation is {results['clinic']:.3f} (in clear it would be {clear:.3f})")
    print(f"laboratory: learned {results['laboratory'] or 'nothing'}")
    return {"shared": results["clinic"], "clear": clear, "laboratory": results["laboratory"]}


if __name__ == "__main__":
    main()
