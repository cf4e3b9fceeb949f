"""Secondaries built the way a run builds them: from a federation file, with ledgers on the disk."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from helpers.secondaries import answer
from torch import Tensor

from securevfl import read_federation
from securevfl.config.federation import link_spec
from securevfl.data.tables import RowSplit
from securevfl.federation.build import build_secondary
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import Purpose, RunPlan, plan_run, run_facts
from securevfl.federation.session.party_files import PartyFiles
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.testing import read_tables, save_federation, write_federation


@dataclass(frozen=True, kw_only=True, eq=False)
class Built:
    """All secondaries of one run, before its first round."""

    plan: RunPlan
    split: RowSplit
    secondaries: dict[int, Secondary]
    """By rank."""

    files: dict[int, PartyFiles]

    def round(
        self, number: int, rows: npt.NDArray[np.int64], purpose: Purpose = "release"
    ) -> RoundPlan:
        """Return a round of all secondaries."""
        return RoundPlan(
            round_number=number, rows=rows, active=tuple(self.secondaries), purpose=purpose
        )

    def answer(self, plan: RoundPlan) -> Tensor:
        """Return what leaves every secondary in a round, in units of the average: (k, B, L, H)."""
        return torch.stack(
            [
                self.plan.cut.decode(
                    answer(one, plan), rows=len(plan.rows), active=("a",), round_number=1
                )
                for one in self.secondaries.values()
            ]
        ).double()

    def end_epoch(self, epoch: int, *, number: int) -> None:
        """End an epoch at every secondary, as its handlers do: after the validation rows."""
        rows = self.split.validation
        for one in self.secondaries.values():
            one.validator.validate_round(self.round(number, rows, "validation"))
            one.validator.validate_epoch(EpochMark(epoch=epoch, best=True))

    def passed(self) -> list[RoundPlan]:
        """Return the rounds in which a frozen run releases its rows."""
        rows = np.arange(self.plan.facts.rows)
        batch = self.plan.config.training.batch_size
        parts = [rows[start : start + batch] for start in range(0, len(rows), batch)]
        return [self.round(number, part) for number, part in enumerate(parts, 1)]

    def booked(self, rank: int) -> list[dict[str, Any]]:
        """Return the lines of one secondary's ledger, as they lie on the disk."""
        path = self.files[rank].ledger.path
        assert path is not None
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextmanager
def built(path: Path, folder: Path, *, run: str = "", resume: bool = False) -> Iterator[Built]:
    """Build every secondary of a federation file, as a run in ``folder`` does.

    Args:
        path: The federation file.
        folder: Of the run.
        run: Its id, where parties keep what a later session goes on with.
        resume: Whether this is such a later session.
    """
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    split, facts = run_facts(config, tables[config.primary.name])
    facts = replace(facts, run=run or facts.run)
    plan = plan_run(config, facts)
    spec = link_spec(config)
    link = Linker(spec, keys_of(spec.keys, tables[config.primary.name]))
    with ExitStack() as stack:
        secondaries, files = {}, {}
        for party in config.secondaries:
            own = PartyFiles(folder / party.name, config, party=party.name, resume=resume)
            if resume:
                own.checkpoints.resume()
            stack.enter_context(own).open_ledger(plan)
            if run and not resume:
                own.checkpoints.begin(run)
            linked = link(keys_of(spec.keys, tables[party.name]))
            secondary = build_secondary(
                plan,
                party,
                tables[party.name],
                linked,
                own.ledger,
                files=own.checkpoints.files if run else None,
                device=torch.device("cpu"),
            )
            stack.callback(secondary.close)
            rank = plan.ranks[party.name]
            secondaries[rank], files[rank] = secondary, own
        yield Built(plan=plan, split=split, secondaries=secondaries, files=files)


def write_tables(
    folder: Path, features: npt.NDArray[np.float64], **sections: dict[str, Any]
) -> Path:
    """Write a federation whose two secondaries hold ``features``, in the bounds [-1, 1].

    A record of a secondary lies where the primary's row of the same number does.
    """
    path = write_federation(folder, secondaries=2, rows=len(features), **sections)
    names = [f"f{axis}" for axis in range(features.shape[1])]
    keys = pd.read_csv(folder / "agency.csv")[["lon", "lat"]]
    frame = pd.concat([keys, pd.DataFrame(features, columns=names)], axis=1)
    source = dict(read_federation(path).source)
    for party in source["party"][1:]:
        frame.to_csv(folder / party["data"], index=False)
        party |= {"scaling": "bounds", "bounds": [-1.0, 1.0]}
    return save_federation(folder, source)
