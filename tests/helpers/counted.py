"""Secondaries that answer requests for predictions of a kept model, with or without one record.

They are built as a session builds them, on files of their own: links under the cap, ledgers, counts
of releases. Noise is left out, so that what is compared are the whole numbers that it is added to.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from helpers.removal import Silent
from helpers.secondaries import answer
from torch import Tensor

from securevfl import read_federation
from securevfl.config.federation import FederationConfig, link_spec
from securevfl.data.tables import KeyTable
from securevfl.federation import build
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import (
    RunPlan,
    new_run,
    plan_prediction,
    plan_run,
    prediction_facts,
    run_facts,
)
from securevfl.federation.session.party_files import PartyFiles
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.mpc.codec import decode_sum
from securevfl.testing import read_tables, save_federation, write_federation

MODEL = "5" * 32
CAP = 2
BATCH = 2


def write_counted(folder: Path, *, releases: int, rows: int = 24, **privacy: Any) -> Path:
    """Write a federation whose secondaries count releases; few records, many rows that want them.

    Args:
        folder: Of the tables and the file.
        releases: N.
        rows: The primary's; each secondary has a third of them.
        **privacy: In addition to noise of 1, or instead of it.
    """
    path = write_federation(
        folder,
        rows=rows,
        model={"release": "pooled", "hidden": 4, "neighbours": 2, "heads": 1, "top": "additive"},
        encoder={"method": "random"},
        privacy={
            "noise_multiplier": 1.0,
            "delta": 1e-4,
            "encoder": "frozen",
            "links_per_record": CAP,
        }
        | privacy,
        linkage={"choose": "records"},
        prediction={"releases_per_record": releases},
        training={"batch_size": BATCH},
    )
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-0.3, 0.3]}
        table = folder / party["data"]
        pd.read_csv(table).head(rows // 3).to_csv(table, index=False)
    return save_federation(folder, source)


class Answering:
    """All secondaries of a federation, each with its own files, in one of two worlds."""

    def __init__(
        self,
        path: Path,
        folder: Path,
        *,
        gone: Mapping[str, int] | None = None,
        durable: bool = False,
    ) -> None:
        """Read the tables; the records that are gone are left out.

        Where it is durable, files are synced as those of parties with processes of their own.
        """
        self._durable = durable
        self.config: FederationConfig = read_federation(path)
        self.tables = dict(read_tables(self.config, path.parent))
        primary = self.tables[self.config.primary.name]
        self.training = plan_run(self.config, run_facts(self.config, primary)[1])
        self.spec = link_spec(self.config)
        self.spec = replace(self.spec, choice=replace(self.spec.choice, counted=False))
        self.keys = keys_of(self.spec.keys, primary)
        """Of the primary's table."""
        self.own: dict[str, KeyTable] = {}
        for name, record in (gone or {}).items():
            table = self.tables[name]
            self.tables[name] = table.take(np.delete(np.arange(table.num_rows), record))
        for party in self.config.secondaries:
            self.own[party.name] = keys_of(self.spec.keys, self.tables[party.name])
        self.folder = folder
        self.files: dict[str, PartyFiles] = {}
        self.parties: dict[str, Secondary] = {}
        self.plan: RunPlan | None = None
        self._round = 0

    def begin(self, keys: KeyTable, *, active: tuple[int, ...] = (1, 2), again: int = 0) -> None:
        """Begin a request for predictions of these rows, after ``again`` rows of training."""
        table = KeyTable(
            name=keys.name,
            columns={
                name: np.concatenate([self.keys.columns[name][:again], column])
                for name, column in keys.columns.items()
            },
        )
        facts = prediction_facts(
            run=new_run(), rows=table.num_rows, predicted_rows=keys.num_rows, active=active
        )
        plan = plan_prediction(self.config, facts, noise_share_std=self.training.noise_share_std)
        self.plan = plan
        link = Linker(self.spec, table)
        self.parties = {}
        for rank, name in plan.secondaries.items():
            own = self.files_of(name)
            ledger = own.open_prediction(plan, model=MODEL, keys=self.own[name])
            party = self.config.party(name)
            with mock.patch.object(build, "ExactDiscreteGaussian", Silent):
                self.parties[name] = build.build_secondary(
                    plan,
                    party,
                    self.tables[name],
                    link(self.own[name]),
                    ledger,
                    device=torch.device("cpu"),
                    kept_bottom=build.bottom_at_work(
                        plan, party, self.tables[name], device=torch.device("cpu")
                    ),
                )
            assert plan.ranks[name] == rank
        self._round = 0

    def files_of(self, name: str) -> PartyFiles:
        """Return a party's files, held open."""
        if name not in self.files:
            folder = self.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            self.files[name] = PartyFiles(
                folder, self.config, party=name, resume=True, simulated=not self._durable
            )
        return self.files[name]

    def ledger(self, name: str) -> Ledger:
        """Return a party's ledger, once it was asked."""
        return self.files[name].ledger

    def answer(self, rows: Sequence[int]) -> Tensor:
        """Return the exact sum over the secondaries that answer, in units of the representation.

        Args:
            rows: Places among the rows of the request that are predicted, from 0.
        """
        plan = self.plan
        assert plan is not None, "a request has begun"
        self._round += 1
        first = plan.facts.rows - plan.facts.predicted_rows
        asked = RoundPlan(
            round_number=self._round,
            rows=np.array(rows, dtype=np.int64) + first,
            active=tuple(plan.secondaries),
            purpose="predict",
        )
        elements = len(rows) * math.prod(plan.cut.shape)
        total = torch.zeros(len(rows), math.prod(plan.cut.shape), dtype=torch.float64)
        for secondary in self.parties.values():
            words = answer(secondary, asked)
            units = decode_sum(words, plan.cut.ring, elements=elements, parties_active=1)
            total += units.view(len(rows), -1).double()
        return total * plan.cut.ring.granularity / plan.cut.slots

    def restart(self) -> None:
        """Let all files go, as a process that ends does; the next request opens them again."""
        for secondary in self.parties.values():
            secondary.close()
        for files in self.files.values():
            files.close()
        self.files, self.parties, self.plan = {}, {}, None
