"""What a run costs as its sizes grow: constants measured here, formulas, and a federation of 20.

    OMP_NUM_THREADS=1 python research/scale/scale.py [--quick] [--json FILE]

Small simulated runs of FeT on made-up tables are timed, one thread, and constants are fitted to
their CPU time; the same formulas then say what a larger run takes, which is measured beside them.
Last comes the projection: 10 million rows, 20 parties, 1 Gbit/s, 50 ms there and back. Bytes are
``research/scale/wire.py``, which a test holds to what a run between processes counted.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from scipy.optimize import nnls

sys.path.append(str(Path(__file__).parents[2]))

import securevfl as sv
from research.scale.wire import Bytes, WiredRun
from research.splitavg.growth import Secondary as Averaging
from securevfl.core import files
from securevfl.core.memory import keep_freed_memory
from securevfl.data.tables import PartyTable
from securevfl.federation.messages import RoundKind, Share
from securevfl.federation.rounds import network_primary, primary, secondary
from securevfl.federation.run_plan import ROUNDS_AHEAD, RunFacts
from securevfl.ledger.chain import ChainedFile
from securevfl.linkage.stage import linking
from securevfl.models.fedhssl.encoders import FedHSSLConfig
from securevfl.models.fet.family import FeTBottom
from securevfl.models.fet.settings import FeTConfig
from securevfl.mpc.codec import RingFormat, decode_sum
from securevfl.runtime import primary_run, simulation
from securevfl.transport.identity import Identity, provision
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session

FEATURES: Final = 8
KEYS: Final = 2
GBIT: Final = 125e6
TRIP: Final = 0.050
NUMBERS: Final = 640_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What costs follow from."""

    rows: int
    """N, of the primary; 70 % train, 15 % validate, 15 % test."""
    records: int
    """R, of each secondary."""
    secondaries: int = 1
    """k."""
    neighbours: int = 10
    """K."""
    hidden: int = 32
    """H."""
    batch: int = 128
    """B."""
    epochs: int = 2
    """E."""
    pooled: bool = False
    """Whether L is 1 instead of K."""

    @property
    def positions(self) -> int:
        """L."""
        return 1 if self.pooled else self.neighbours

    @property
    def numbers(self) -> int:
        """B L H, of one release."""
        return self.batch * self.positions * self.hidden

    @property
    def links(self) -> int:
        """B K H: numbers that a secondary works on in a round."""
        return self.batch * self.neighbours * self.hidden

    @property
    def products(self) -> float:
        """Multiplications in the matrix products of a secondary's forward pass of a round.

        Of a link: features and key to H, the encoding's two layers of 64, the block's projections
        (4 H^2), its perceptron (4 H^2) and attention (2 K H).
        """
        hidden, encoding = self.hidden, 64 * 64 + 64 * self.hidden
        each = (FEATURES + KEYS) * hidden + encoding + 8 * hidden**2 + 2 * self.neighbours * hidden
        return float(self.batch * self.neighbours * each)

    @property
    def model(self) -> FeTConfig:
        """The family's settings."""
        return FeTConfig(
            neighbours=self.neighbours,
            hidden=self.hidden,
            release="pooled" if self.pooled else "sequence",
        )

    def split(self) -> tuple[int, int, int]:
        """Return rows for training, validation and testing."""
        tenth = round(0.15 * self.rows)
        return self.rows - 2 * tenth, tenth, tenth


FITTED: Final = [
    # Ten times the records that a batch links to: few links share one, as in a large table.
    Size(rows=12 * batch, records=30_000, neighbours=neighbours, hidden=hidden, batch=batch)
    for neighbours, hidden, batch in (
        (5, 16, 64),
        (10, 32, 128),
        (20, 32, 128),
        (5, 64, 128),
        (20, 64, 64),
        (10, 128, 128),
        (30, 64, 128),
        (5, 192, 64),
        (20, 8, 128),
        (5, 8, 512),
        (2, 32, 1_024),
    )
]
LINKED: Final = [
    Size(rows=rows, records=records, neighbours=neighbours, hidden=8, batch=2_048, epochs=1)
    for rows, records, neighbours in (
        (10_000, 10_000, 5),
        (10_000, 100_000, 20),
        (30_000, 30_000, 10),
        (30_000, 100_000, 40),
    )
]
CHECKED: Final = [
    Size(rows=3_000, records=50_000, neighbours=40, hidden=96, secondaries=2),
    Size(rows=60_000, records=200_000, neighbours=25, hidden=8, batch=2_048, epochs=1),
]


def tables(size: Size) -> list[PartyTable]:
    """Return made-up tables whose keys lie in a square."""
    random = np.random.default_rng(1)
    made = []
    for number in range(size.secondaries + 1):
        rows = size.records if number else size.rows
        features = random.normal(size=(rows, FEATURES)).astype(np.float32)
        made.append(
            PartyTable(
                name=f"bank-{number}" if number else "agency",
                key_names=("x", "y"),
                keys=random.uniform(0, 10, (rows, KEYS)),
                feature_names=tuple(f"f{column}" for column in range(FEATURES)),
                features=features,
                labels=None if number else features[:, 0].copy(),
            )
        )
    return made


class Clock:
    """CPU seconds of every call of what it watches."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def watching(self, targets: Mapping[str, tuple[Any, str]]) -> Iterator[None]:
        """Time functions and methods, by the names that they get."""
        patches = []
        for name, (owner, attribute) in targets.items():
            patches.append(mock.patch.object(owner, attribute, self._timed(name, owner, attribute)))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    def _timed(self, name: str, owner: Any, attribute: str) -> Callable[..., Any]:
        real = getattr(owner, attribute)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            result = real(*arguments, **named)
            took = time.process_time() - began
            purpose = getattr(arguments[1], "purpose", "") if len(arguments) > 1 else ""
            self.seconds[f"{name} {purpose}".strip()].append(took)
            return result

        return timed


WATCHED: Final = {
    "answer": (secondary.Secondary, "hear_round"),
    "learn": (secondary.Secondary, "learn"),
    "epoch": (network_primary.NetworkPrimary, "_train_epoch"),
    "forward": (primary.Primary, "_forward"),
    "link": (linking.Linker, "__call__"),
    "alone": (primary_run, "train_alone"),
    "evaluate": (primary_run, "evaluate"),
}


def run(size: Size, *, with_alone: bool = False) -> tuple[dict[str, float], dict[str, Any]]:
    """Return medians of CPU seconds by stage of a simulated run, and what its folder says."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, clock.watching(WATCHED):
        sv.simulate(
            tables(size),
            size.model,
            privacy=sv.dp.Privacy(mechanism="none"),
            training=sv.TrainingSettings(epochs=size.epochs, batch_size=size.batch),
            base="none",
            with_alone=with_alone,
            out=Path(folder),
        )
        own = Path(folder) / "parties" / "bank-1"
        lines = (own / "ledger.jsonl").read_text().splitlines()
        charges = [line for line in lines if json.loads(line)["kind"] == "charge"]
        bottom = FeTBottom(size.model, num_features=FEATURES, key_dim=KEYS)
        weights = sum(one.numel() for one in bottom.parameters())
        told = {
            "line": charges[-1],
            "saved": (own / f"epoch-{size.epochs}.pt").stat().st_size / weights,
        }
    took = {name: statistics.median(values) for name, values in clock.seconds.items()}
    secondary_step = took["answer train"] + took["learn train"]
    rounds = len(clock.seconds["learn train"]) / (size.secondaries * size.epochs)
    return {
        "secondary": secondary_step,
        "primary": took["epoch"] / rounds - size.secondaries * secondary_step,
        "secondary forward": took["answer validation"],
        "link": took["link"],
        **{name: took[name] for name in ("alone", "evaluate") if name in took},
    }, told


def pretraining(size: Size) -> float:
    """Return CPU seconds a record, party and iteration of FedHSSL's pretraining."""
    clock, iterations = Clock(), 2
    with clock.watching({"pretrain": (simulation, "_pretrain")}):
        sv.simulate(
            tables(size),
            FedHSSLConfig(),
            privacy=sv.dp.Privacy(mechanism="none"),
            training=sv.TrainingSettings(epochs=1),
            pretraining=sv.PretrainingSettings(iterations=iterations),
            base="none",
            with_alone=False,
        )
    records = size.split()[0] * (size.secondaries + 1)
    return sum(clock.seconds["pretrain"]) / iterations / records


def fit(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return constants, none negative, that fit best; each size counts by its relative error."""
    matrix = np.array(columns) / np.array(values)[:, None]
    found, _ = nnls(matrix, np.ones(len(values)))
    return [float(one) for one in found]


def secondary_terms(size: Size) -> list[float]:
    """Return what a secondary's round is made of: products, numbers of links, links, itself."""
    return [size.products, float(size.links), float(size.batch * size.neighbours), 1.0]


def primary_terms(size: Size) -> list[float]:
    """Return what the primary's round is made of: own rows' products, numbers, rows, itself."""
    own = float(size.batch * 24 * size.hidden**2)
    return [own, float(size.numbers), float(size.batch), 1.0]


def linking_terms(size: Size) -> list[float]:
    """Return what linking at one secondary is made of: links, and the ways down a tree."""
    ways = (size.rows + size.records) * math.log2(size.records)
    return [float(size.rows * size.neighbours), ways]


def linking_memory(size: Size) -> float:
    """Return the most bytes a link that numpy holds while one secondary links."""
    peaks = []
    real = linking.Linker.__call__

    def watched(*arguments: Any) -> Any:
        tracemalloc.start()
        result = real(*arguments)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return result

    with mock.patch.object(linking.Linker, "__call__", watched):
        run(size)
    return peaks[0] / size.rows / size.neighbours


def averaging(repeats: int) -> dict[str, float]:
    """Return seconds a number of SplitAvg at a secondary: rounding, one key stream, noise."""
    x = torch.randn(NUMBERS // 5000, 5000)
    x *= 0.99 / x.norm(dim=1, keepdim=True)
    few, many = Averaging(2, None), Averaging(10, None)
    for _ in range(repeats):
        few.average(x)
        many.average(x)
    middle = {
        name: [statistics.median(one.figures[name]) / NUMBERS for one in (few, many)]
        for name in ("masks", "plain", "noised")
    }
    stream = (middle["masks"][1] - middle["masks"][0]) / 8
    return {
        "round": middle["plain"][0] - middle["masks"][0],
        "stream": stream,
        "noise": statistics.fmean(
            noised - plain for noised, plain in zip(middle["noised"], middle["plain"], strict=True)
        ),
    }


def adding(repeats: int) -> dict[str, float]:
    """Return seconds a number at the primary: adding one secondary's words, and decoding."""
    fmt = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=2)
    words = torch.full((fmt.words(NUMBERS),), fmt.bound_units * ((1 << 32) + 1))
    adds, decodes = [], []
    for _ in range(repeats):
        total, began = words.clone(), time.process_time()
        total += words
        added = time.process_time()
        decode_sum(total, fmt, elements=NUMBERS, parties_active=2)
        decodes.append(time.process_time() - added)
        adds.append(added - began)
    return {
        "add": statistics.median(adds) / NUMBERS,
        "decode": statistics.median(decodes) / NUMBERS,
    }


def carrying(repeats: int) -> float:
    """Return CPU seconds a byte over TLS on this machine, both ends together."""
    names = {"agency": 0, "bank-1": 1}
    words = np.zeros(NUMBERS // 2, dtype=np.int64)
    with tempfile.TemporaryDirectory() as folder:
        pinned = provision(list(names), Path(folder), valid_days=1)
        own, other = (Identity.load(Path(folder) / name, name) for name in names)
        star = PrimaryTransport(("127.0.0.1", 0), own, pinned, new_session(), names)
        caller = SecondaryTransport(star.listen(), other, pinned, names)
        joining = Thread(target=caller.connect, args=(60.0,))
        joining.start()
        star.wait_for_parties(60.0)
        joining.join()
        began = time.process_time()
        for number in range(1, repeats + 1):
            caller.send(Share(round_number=number, words=words).to_message())
            star.receive("bank-1", RoundKind.SHARE, round_number=number, deadline_s=60.0)
        took = time.process_time() - began
        for end in (caller, star):
            end.close()
    return took / repeats / words.nbytes


def writing(repeats: int, line: str) -> dict[str, float]:
    """Return seconds of a durable line of a ledger, and of a saved byte; memory of a line."""
    entry = {name: value for name, value in json.loads(line).items() if name != "previous"}
    with tempfile.TemporaryDirectory() as folder:
        chain = ChainedFile(Path(folder) / "ledger.jsonl")
        began = time.perf_counter()
        for _ in range(repeats):
            chain.append(entry)
        durable = (time.perf_counter() - began) / repeats
        chain.close()
        content = bytes(20_000_000)
        began = time.perf_counter()
        files.write_bytes(Path(folder) / "state", content)
        saved = (time.perf_counter() - began) / len(content)
    tracemalloc.start()
    held = [json.loads(line) for _ in range(1000)]
    memory = tracemalloc.get_traced_memory()[0] / len(held)
    tracemalloc.stop()
    return {"line_s": durable, "saved_s": saved, "line_memory": memory}


def kept_for_the_gradient(size: Size) -> float:
    """Return numbers that torch keeps between forward and backward, for each of B K H."""
    bottom = FeTBottom(size.model, num_features=FEATURES, key_dim=KEYS).train()
    rows, links = size.batch, size.neighbours
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive = bottom(
            torch.randn(rows, links, FEATURES),
            torch.randn(rows, links, KEYS),
            torch.ones(rows, links, dtype=torch.bool),
        )
    assert alive.requires_grad
    return sum(held.values()) / 4 / size.links


@dataclass(frozen=True, kw_only=True)
class Constants:
    """All that was measured, in seconds, bytes and numbers."""

    secondary: Sequence[float]
    primary: Sequence[float]
    forward: float
    """A forward pass beside a step of a secondary."""
    link: Sequence[float]
    alone: float
    """Seconds a row, of all that the primary fits alone."""
    evaluate: float
    """Seconds a test row."""
    averaging: Mapping[str, float]
    adding: Mapping[str, float]
    carry: float
    writing: Mapping[str, float]
    line: int
    """Bytes of a ledger's line."""
    saved: float
    """Bytes a weight of a saved epoch."""
    kept: float
    """Numbers that torch keeps for the gradient, for each of B K H."""
    link_memory: float
    """Bytes a link while linking, at most."""
    pretrain: float
    """Seconds a record, party and iteration of FedHSSL's pretraining at its default widths."""

    def secondary_round(self, size: Size) -> float:
        """Return CPU seconds of a secondary's training round, without SplitAvg's masks."""
        terms = secondary_terms(size)
        return sum(c * t for c, t in zip(self.secondary, terms, strict=True))

    def primary_round(self, size: Size) -> float:
        """Return CPU seconds of the primary's training round, without wires."""
        terms = primary_terms(size)
        return sum(c * t for c, t in zip(self.primary, terms, strict=True))

    def links(self, size: Size) -> float:
        """Return CPU seconds of one secondary's linking."""
        return sum(c * t for c, t in zip(self.link, linking_terms(size), strict=True))


def measured(*, quick: bool) -> Constants:
    """Measure everything."""
    sizes = FITTED[::3] if quick else FITTED
    found = [run(size) for size in sizes]
    lonely = replace(FITTED[0], rows=768 if quick else 3_000, records=1_500, epochs=1)
    alone, told = run(lonely, with_alone=True)
    repeats = 5 if quick else 41
    line = told["line"]
    linked = [(size, run(size)[0]["link"]) for size in (LINKED[:2] if quick else LINKED)]
    return Constants(
        secondary=fit([secondary_terms(s) for s in sizes], [one["secondary"] for one, _ in found]),
        primary=fit([primary_terms(s) for s in sizes], [one["primary"] for one, _ in found]),
        forward=statistics.median(one["secondary forward"] / one["secondary"] for one, _ in found),
        link=fit([linking_terms(size) for size, _ in linked], [took for _, took in linked]),
        alone=alone["alone"] / lonely.rows,
        evaluate=alone["evaluate"] / lonely.split()[2],
        averaging=averaging(repeats),
        adding=adding(repeats),
        carry=carrying(repeats),
        writing=writing(repeats * 5, line),
        line=len(line) + 1,
        saved=statistics.median(one["saved"] for _, one in found),
        kept=kept_for_the_gradient(FITTED[6]),
        link_memory=linking_memory(LINKED[1] if quick else LINKED[3]),
        pretrain=pretraining(replace(FITTED[0], records=1_500)),
    )


def wired(size: Size, lanes: int = 2) -> WiredRun:
    """Return a run's bytes."""
    train, validation, test = size.split()
    return WiredRun(
        facts=RunFacts(
            rows=size.rows, train_rows=train, validation_rows=validation, test_rows=test
        ),
        primary="agency",
        secondaries=[f"bank-{number}" for number in range(1, size.secondaries + 1)],
        keys=KEYS,
        cut=(size.positions, size.hidden),
        lanes=lanes,
        batch_size=size.batch,
        positions={
            "frequencies": (32, KEYS),
            "into.weight": (64, 64),
            "into.bias": (64,),
            "out.weight": (size.hidden, 64),
            "out.bias": (size.hidden,),
        },
        average_every=1,
        best_epochs=[True] * size.epochs,
    )


def print_constants(c: Constants) -> None:
    """Print what was measured."""
    nano = 1e9
    products, links, link, each = c.secondary
    own, numbers, row, step = c.primary
    rows = {
        "a1: a secondary's training round, a product of forward": f"{nano * products:.3f} ns",
        "a2: the same, a number of B K H": f"{nano * links:.1f} ns",
        "a3: the same, a link of B K": f"{1e6 * link:.2f} us",
        "a4: the same, a round": f"{1e3 * each:.2f} ms",
        "f: a forward pass beside a training round": f"{c.forward:.2f}",
        "p1: the primary's training round, a product of B 24 H^2": f"{nano * own:.3f} ns",
        "p2: the same, a number of B L H": f"{nano * numbers:.1f} ns",
        "p3: the same, a row of B": f"{1e6 * row:.2f} us",
        "p4: the same, a round": f"{1e3 * step:.2f} ms",
        "s1: SplitAvg at a secondary, rounding, a number": f"{nano * c.averaging['round']:.2f} ns",
        "s2: one key stream, a number": f"{nano * c.averaging['stream']:.2f} ns",
        "s3: noise, a number": f"{nano * c.averaging['noise']:.2f} ns",
        "s4: at the primary, adding words, a number": f"{nano * c.adding['add']:.2f} ns",
        "s5: at the primary, decoding, a number": f"{nano * c.adding['decode']:.2f} ns",
        "w: a byte over TLS, both ends together": f"{nano * c.carry:.2f} ns",
        "n1: linking numeric keys, a link": f"{nano * c.link[0]:.0f} ns",
        "n2: the same, a row or record and log2 R": f"{nano * c.link[1]:.0f} ns",
        "y: memory while linking, a link of N K": f"{c.link_memory:.0f} bytes",
        "o: all models of the primary alone, a row": f"{1e3 * c.alone:.2f} ms",
        "v: metrics and intervals, a test row": f"{1e3 * c.evaluate:.3f} ms",
        "g: a durable line of a ledger": f"{1e3 * c.writing['line_s']:.2f} ms, {c.line} bytes, "
        f"{c.writing['line_memory']:.0f} bytes of memory",
        "z: a saved epoch, a weight": f"{c.saved:.1f} bytes, {nano * c.writing['saved_s']:.1f} ns "
        "each",
        "h: FedHSSL's pretraining, a record, party and iteration": f"{1e3 * c.pretrain:.2f} ms",
        "m: numbers kept for the gradient, a number of B K H": f"{c.kept:.1f}",
    }
    print("| constant | measured |\n| --- | --- |")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


_SHOWN: Final = ("rows", "records", "secondaries", "neighbours", "hidden", "batch")


def print_check(c: Constants, size: Size) -> dict[str, Any]:
    """Print what the formulas say of a run that no constant was fitted to, and what it took."""
    took, _ = run(size)
    said = {
        "a secondary's training round": (c.secondary_round(size), took["secondary"]),
        "a secondary's evaluation round": (
            c.forward * c.secondary_round(size),
            took["secondary forward"],
        ),
        "the primary's training round": (c.primary_round(size), took["primary"]),
        "linking, a secondary": (c.links(size), took["link"]),
    }
    shown = ", ".join(f"{name} {getattr(size, name):,}" for name in _SHOWN)
    print(f"\n{shown}\n\n| stage | formula, ms | measured, ms | off |\n| --- | --- | --- | --- |")
    for name, (formula, measure) in said.items():
        off = 100 * (formula / measure - 1)
        print(f"| {name} | {1e3 * formula:.1f} | {1e3 * measure:.1f} | {off:+.0f} % |")
    return {name: {"formula": one, "measured": other} for name, (one, other) in said.items()}


def project(c: Constants, size: Size) -> dict[str, dict[str, float]]:
    """Return seconds and bytes of every stage, the slowest party's machine having one core."""
    k, batch = size.secondaries, size.batch
    train, validation, test = size.split()
    stages = wired(size).stages("bank-1")

    def of_primary(one: Bytes) -> float:
        """Seconds that the primary's line takes: what it sends and gets go at the same time."""
        return k * max(one.sent, one.received) / GBIT

    def both(one: Bytes) -> float:
        return k * (one.sent + one.received) / GBIT

    noise_and_masks = c.averaging["round"] + (k - 1) * c.averaging["stream"]
    words = 4 * size.numbers
    masked = size.numbers * (noise_and_masks + c.averaging["noise"]) + words * c.carry / 2
    at_secondary = c.secondary_round(size) + masked + words * c.carry / 2
    at_primary = (
        c.primary_round(size)
        + size.numbers * (k * c.adding["add"] + c.adding["decode"])
        + k * 2 * words * c.carry / 2
    )
    rounds = size.epochs * math.ceil(train / batch)
    looks = size.epochs * math.ceil(validation / batch) + math.ceil(test / batch)
    forward = c.forward * c.secondary_round(size) + masked
    weights = sum(
        one.numel()
        for one in FeTBottom(size.model, num_features=FEATURES, key_dim=KEYS).parameters()
    )
    lines = rounds + looks
    return {
        "handshake": {"wire": both(stages["handshake"]), "trips": 6 * TRIP},
        "linking": {
            "wire": of_primary(stages["linking"]),
            "secondary": c.links(size),
            "trips": TRIP,
        },
        "training rounds": {
            "wire": both(stages["training"]),
            "secondary": rounds * at_secondary,
            "primary": rounds * at_primary,
            "trips": rounds * TRIP,
        },
        "averages of encodings": {
            "wire": both(stages["averaging"]),
            "trips": 2 * size.epochs * TRIP,
        },
        "evaluation rounds": {
            "wire": both(stages["evaluation"]),
            "secondary": looks * forward,
            "primary": looks * at_primary / 3,
            "trips": looks / ROUNDS_AHEAD * TRIP,
        },
        "ledger lines": {"disk": lines * c.writing["line_s"]},
        "ends of epochs": {
            "wire": both(stages["countersigning"]) + both(stages["marks"]),
            "disk": size.epochs * weights * c.saved * c.writing["saved_s"],
            "trips": 2 * (size.epochs + 2) * TRIP,
        },
        "the primary alone": {"primary": c.alone * size.rows},
        "metrics and intervals": {"primary": c.evaluate * test},
    }


def memory(c: Constants, size: Size) -> dict[str, float]:
    """Return gigabytes that grow with the run, at a secondary and at the primary."""
    train, validation, test = size.split()
    rounds = size.epochs * math.ceil((train + validation) / size.batch) + math.ceil(
        test / size.batch
    )
    return {
        "secondary: links, once made (16 N K)": 16 * size.rows * size.neighbours / 1e9,
        "secondary: while linking (y N K)": c.link_memory * size.rows * size.neighbours / 1e9,
        "secondary: table (4 R (F + D) + 8 R D)": size.records
        * (4 * (FEATURES + KEYS) + 8 * KEYS)
        / 1e9,
        "secondary: the primary's keys (8 N D)": 8 * size.rows * KEYS / 1e9,
        "secondary: a step (4 m B K H)": 4 * c.kept * size.links / 1e9,
        "primary: table (4 N (F + D) + 8 N D)": size.rows
        * (4 * (FEATURES + KEYS) + 8 * KEYS)
        / 1e9,
        "primary: words in flight (4 k B L H)": 4 * size.secondaries * size.numbers / 1e9,
        "both: lines of the ledger": rounds * c.writing["line_memory"] / 1e9,
    }


LARGE: Final = Size(
    rows=10_000_000,
    records=10_000_000,
    secondaries=19,
    neighbours=50,
    hidden=64,
    batch=128,
    epochs=10,
)
PROJECTED: Final = {
    "as the defaults are (K = 50, H = 64, B = 128)": LARGE,
    "pooled (L = 1)": replace(LARGE, pooled=True),
    "pooled, B = 4,096": replace(LARGE, pooled=True, batch=4_096),
}


def print_projection(c: Constants) -> dict[str, Any]:
    """Print 10 million rows among 20 parties, stage by stage."""
    told: dict[str, Any] = {}
    print("\n10 million rows and records, 20 parties, 10 epochs, hours (one core a party):\n")
    for title, size in PROJECTED.items():
        stages, held = project(c, size), memory(c, size)
        told[title] = {"stages": stages, "memory": held}
        print(f"\n{title}\n\n| stage | wire | secondary | primary | disk | round trips | all |")
        print("| --- " * 7 + "|")
        whole = 0.0
        for name, parts in stages.items():
            columns = ("wire", "secondary", "primary", "disk", "trips")
            hours = [parts.get(one, 0.0) / 3600 for one in columns]
            whole += sum(hours)
            cells = " | ".join(_short(one) for one in [*hours, sum(hours)])
            print(f"| {name} | {cells} |")
        print(f"| all | | | | | | {_short(whole)} |")
        print("\n| memory | GB |\n| --- | --- |")
        for name, amount in held.items():
            print(f"| {name} | {_short(amount)} |")
    return told


def _short(value: float) -> str:
    if not value:
        return ""
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def main() -> None:
    """Measure, print the constants, check them, and project."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few sizes, rough constants")
    parser.add_argument("--json", type=Path, help="write all figures there too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"load {os.getloadavg()[0]:.1f}\n")
    constants = measured(quick=arguments.quick)
    print_constants(constants)
    check = [print_check(constants, size) for size in CHECKED[: 1 if arguments.quick else None]]
    projected = print_projection(constants)
    if arguments.json:
        figures = {"check": check, "projected": projected}
        files.write_json(arguments.json, figures, for_others=True)


if __name__ == "__main__":
    main()
