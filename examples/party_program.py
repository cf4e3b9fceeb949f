"""One program that every party runs: a bank and a bureau train, and the bank alone has the result.

``@sv.party_program`` gives each party a process of its own, as torchrun and CrypTen's launcher do
(``torchrun --nproc-per-node 2 examples/party_program.py`` works too). Each process reads its own
table and no other; they meet over mutual TLS.

Run: ``python examples/party_program.py``, which prints::

    bank: test AUC 0.950 together, 0.662 alone
    bureau: has no result
"""

import argparse

import numpy as np
import pandas as pd

import securevfl as sv

DEVICES = argparse.ArgumentParser()
DEVICES.add_argument("--device", default="cpu")


def read_table(party: str, rows: int = 400) -> sv.data.PartyTable:
    """Make the table of one party up; in earnest each reads a file that only it has."""
    random = np.random.default_rng(0)
    wealth, age = random.normal(size=rows), random.normal(size=rows)
    if party == "bureau":
        frame = pd.DataFrame({"id": np.arange(rows), "wealth": wealth})
        return sv.data.from_frame(frame, name=party, key="id")
    late = wealth + age / 2 + random.normal(size=rows) / 2 < 0
    frame = pd.DataFrame({"id": np.arange(rows), "age": age, "late": late})
    return sv.data.from_frame(frame, name=party, key="id", label="late")


@sv.party_program(parties=2)
def program(me: sv.ThisParty) -> dict[str, float] | None:
    """Train with the other party; return test figures at the bank, and None at the bureau."""
    run = me.train(
        read_table("bureau" if me.rank else "bank"),
        "top1sim",
        privacy=sv.dp.Privacy(mechanism="none"),
        training=sv.TrainingSettings(epochs=10, learning_rate=0.02),
        device=DEVICES.parse_known_args()[0].device,
    )
    if run is None:
        return None
    return {"joint": run.metrics["test"], "alone": run.metrics["alone_test"]}


if __name__ == "__main__":
    bank, bureau = program()
    if bank is not None:
        print(f"bank: test AUC {bank['joint']:.3f} together, {bank['alone']:.3f} alone")
        print(f"bureau: has {bureau or 'no result'}")
