"""Every typed message as it comes off the wire, with what its reader knows of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from helpers.linking import hidden_spec, key_table

from securevfl.data.scaling import KeyScaler
from securevfl.desk.setup.kit import PeerFacts
from securevfl.federation.messages import (
    AverageRequest,
    EpochMark,
    Gradient,
    Hello,
    LinkCount,
    LinkCountRequest,
    Mean,
    PredictRequest,
    Ready,
    RoundPlan,
    Share,
    TrainingRows,
    Welcome,
)
from securevfl.federation.run_plan import RunFacts
from securevfl.ledger.countersigning import CountersignRequest, Heads, Memories, Memory, SignedHead
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import Field, KeySpec
from securevfl.linkage.protections.plaintext import LinkKeys
from securevfl.linkage.sampling import EligiblePairs
from securevfl.linkage.stage.linkage_parts import METRICS
from securevfl.linkage.stage.messages import (
    Linked,
    LinkedRows,
    Lists,
    MadeSimilarities,
    OwnSimilarities,
)
from securevfl.mpc.dealt_sums import SEED_BYTES, DealtFor
from securevfl.mpc.dealt_tuples import TupleRequest
from securevfl.stages.bloom.by_codes import Codes
from securevfl.stages.class_means.messages import (
    ClassMeansCall,
    ClassMeansDealing,
    ClassMeansDone,
    ClassMeansLabels,
    ClassMeansMasked,
    ClassMeansNoise,
    ClassMeansSeed,
    ClassMeansShifted,
    ClassMeansState,
    ClassMeansSums,
    ClassMeansTurn,
)
from securevfl.stages.encrypted_linkage.blockwise import (
    Cells,
    DistanceShare,
    Offer,
    RecordBlocks,
    RowBlocks,
    Shift,
    Turn,
)
from securevfl.stages.encrypted_linkage.homomorphic import PackedRows
from securevfl.stages.encrypted_linkage.paillier import EncryptedDistances, EncryptedRows
from securevfl.stages.encrypted_linkage.shares import DealerTurn, Dealt, MaskedKeys
from securevfl.stages.pretraining.messages import (
    CrossBatch,
    IterationBegin,
    IterationEnd,
    LearnLocally,
    Projections,
    TopsRequest,
)
from securevfl.stages.programs.messages import (
    ComputingBegin,
    ComputingDealing,
    ComputingDone,
    ComputingKey,
    ComputingRequest,
    ComputingSeed,
    ComputingTensor,
)
from securevfl.stages.psi.psi import BlindedPoints, EvaluatedPoints, RowValues
from securevfl.transport.channels import SealedFrom, SealedTo
from securevfl.transport.message import Done, Failure, Ping, SessionStart, TypedMessage

_DIGEST: Final = "d" * 64
_RUN: Final = "0" * 32
_MODULUS: Final = 2**511 + 1
_SPEC: Final = hidden_spec("shares")
_SIZES: Final = np.array([[1, 4], [2, 3]])
_CAPPED: Final = hidden_spec("shares", links_per_record=2, sampling_rate=0.5)
_MIXED: Final = KeySpec(
    columns=("lon", "lat"),
    metric=METRICS["mixed"],
    fields=(
        Field(name="lon", kind="text"),
        Field(name="lat", kind="number", scale=1.0),
    ),
)
_NUMBERS: Final = np.arange(6, dtype=np.int64).reshape(2, 3)
_WORDS: Final = _NUMBERS.view(np.uint64)
_DEALT: Final = DealtFor(run="a run", secondary=1, rows=3, bins=2, numbers=3)
_POINTS = np.zeros((2, 32), np.uint8)
_FLOATS: Final = np.full((2, 4), 0.25, dtype=np.float32)
_INDICES: Final = np.array([[0, 2, 1, -1], [1, 0, 2, -1]])


@dataclass(frozen=True)
class Read:
    """One way in which a message is read."""

    example: TypedMessage
    knows: Mapping[str, Any]
    """What ``from_message`` is given beside the message."""


def _read(example: TypedMessage, **knows: Any) -> Read:
    return Read(example, knows)


READS: Final = (
    _read(
        Hello(
            digest=_DIGEST,
            public=bytes(32),
            signature=bytes(64),
            epochs=(1,),
            stage_steps=(),
            run="",
        ),
    ),
    _read(
        Welcome(
            facts=RunFacts(rows=9, train_rows=4, validation_rows=2, test_rows=3, run=_RUN),
            keys={"bank": (bytes(32), bytes(64))},
        ),
        callers=lambda _facts: ("bank",),
    ),
    _read(LinkCountRequest()),
    _read(LinkCount(linked=4), rows=9),
    _read(TrainingRows(rows=4), most=9),
    _read(Done()),
    _read(RoundPlan(round_number=1, rows=np.arange(3), active=(1, 2), purpose="train")),
    _read(Share(round_number=1, words=np.arange(5)), count=5),
    _read(Gradient(round_number=1, gradient=_FLOATS), shape=(2, 4)),
    _read(Mean(round_number=1, values={"weight": _FLOATS}), shapes={"weight": (2, 4)}),
    _read(EpochMark(epoch=3, best=True, restore_best=False)),
    _read(
        Memories(
            parties=("agency", "bank"),
            memories={
                "bank": Memory(nonce=bytes(16), heads={"bank": (bytes(32), 3)}, signature=bytes(64))
            },
        ),
        senders=("bank",),
        parties=("agency", "bank"),
    ),
    _read(
        Heads(
            heads={
                "bank": SignedHead(
                    head=bytes(32),
                    lines=3,
                    signature=bytes(64),
                    since=1,
                    proof=np.zeros((2, 32), dtype=np.uint8),
                )
            }
        ),
        senders=("bank",),
    ),
    _read(CountersignRequest(point="end")),
    _read(PredictRequest(run=_RUN, rows=5, predicted_rows=3, active=(1, 2))),
    _read(Linked()),
    _read(OwnSimilarities(similarities=_FLOATS), rows=2, neighbours=4),
    _read(LinkedRows(rows=np.array([True, False]), apart=False), rows=2),
    _read(MadeSimilarities(similarities=_FLOATS), rows=2, neighbours=4),
    _read(
        Lists(
            candidates=LinkTable(indices=_INDICES, distances=np.zeros((2, 4))), apart=True, most=9
        ),
        spec=_SPEC,
        rows=2,
        records=9,
    ),
    _read(
        Lists(
            candidates=EligiblePairs(
                starts=np.array([0, 2, 3]), records=np.array([1, 2, 8]), distances=np.zeros(3)
            ),
            apart=False,
            most=18,
        ),
        spec=_CAPPED,
        rows=2,
        records=9,
    ),
    _read(Shift(shift=np.array([1, 2])), key_dim=2),
    _read(Cells(cells=_NUMBERS), count=2, key_dim=3),
    _read(Offer(records=9, tag="t")),
    _read(Turn(records=9, tags=("a", "b")), name="bank", neighbours=4),
    _read(RowBlocks(rows=np.arange(3), sizes=_SIZES, done=0, of=9), num_rows=9),
    _read(RecordBlocks(records=np.arange(7), sizes=_SIZES, due=2), num_records=9),
    _read(DistanceShare(share=_WORDS.ravel()), pairs=6),
    _read(Codes(codes=np.zeros((2, 8), dtype=np.uint8), check="x"), code_bytes=8),
    _read(
        EncryptedRows(blocks=[PackedRows(modulus=_MODULUS, rows=1, packs=((7, 9),))]),
        rows=[1],
        key_dim=2,
        key_bits=512,
    ),
    _read(
        EncryptedDistances(blocks=[[[7, 9]]], modulus=_MODULUS),
        packs=[1],
        records=[2],
        modulus=_MODULUS,
    ),
    _read(RowValues(values=_POINTS[:, :16]), values=2),
    _read(BlindedPoints(count=2, points=_POINTS)),
    _read(EvaluatedPoints(points=_POINTS), points=2),
    _read(DealerTurn(secondary=1, sizes=_SIZES), ranks=[1, 2]),
    _read(Dealt(mask=_WORDS, product=_WORDS.ravel()), count=2, key_dim=3, pairs=6),
    _read(MaskedKeys(keys=_WORDS), count=2, key_dim=3),
    _read(
        LinkKeys(
            keys=key_table("agency", 2, seed=1),
            scaler=KeyScaler(centre=(0.0, 0.0), width=(1.0, 1.0)),
        ),
        spec=_SPEC.keys,
        rows=2,
    ),
    _read(
        LinkKeys(
            keys=replace(
                key_table("agency", 2, seed=1),
                columns={
                    "lon": np.array(["Élan", None], dtype=object),
                    "lat": np.array([0.5, np.nan]),
                },
            ),
            scaler=None,
        ),
        spec=_MIXED,
        rows=2,
    ),
    _read(IterationBegin(iteration=1, held_out=np.arange(3))),
    _read(CrossBatch(round_number=1, rows=np.arange(2), sent=_FLOATS), width=4),
    _read(Projections(round_number=1, vectors=_FLOATS), shape=(2, 4)),
    _read(LearnLocally(iteration=2)),
    _read(TopsRequest(round_number=1)),
    _read(AverageRequest(round_number=1)),
    _read(SessionStart(rank=1)),
    _read(IterationEnd(iterations=2, last=True)),
    _read(Failure(party="bank", reason="is gone", kind="lost"), relayed=True),
    _read(Failure(party="bank", reason="is gone", kind="lost"), relayed=False),
    _read(SealedTo(rank=2, sealed=np.zeros(20, dtype=np.uint8))),
    _read(SealedFrom(rank=2, sealed=np.zeros(20, dtype=np.uint8))),
    _read(ClassMeansState(settled=False, numbers=4, columns=3)),
    _read(ClassMeansLabels(bins_of_rows=np.array([0, 2, 1])), rows=3, bins=3),
    _read(ClassMeansTurn(secondary=1, numbers=4), due=(1, 2)),
    _read(
        ClassMeansDealing(shifts=np.array([0, 1]), correction=_WORDS),
        rows=2,
        bins=2,
        numbers=3,
    ),
    _read(ClassMeansSeed(seed=bytes(SEED_BYTES), what=_DEALT), what=_DEALT),
    _read(ClassMeansShifted(said=np.array([0, 1])), rows=2, bins=2),
    _read(ClassMeansNoise(words=_WORDS), bins=2, numbers=3),
    _read(ClassMeansMasked(words=_WORDS.reshape(1, 2, 3)), rows=1, bins=2, numbers=3),
    _read(ClassMeansSums(sums=_NUMBERS), bins=2, numbers=3),
    _read(Ready()),
    _read(ClassMeansCall()),
    _read(ClassMeansDone()),
    _read(ComputingBegin(world=(1, 2), number=7)),
    _read(ComputingKey(key=bytes(32))),
    _read(ComputingSeed(seed=bytes(SEED_BYTES), context=bytes(32))),
    _read(
        ComputingTensor(step=3, values=np.arange(6).reshape(2, 3)),
        step=3,
        dtype=np.int64,
        shape=(2, 3),
    ),
    _read(
        ComputingRequest(
            requests=(
                TupleRequest(number=0, kind="square", sizes=((2, 3),)),
                TupleRequest(
                    number=1,
                    kind="triple",
                    sizes=((1, 1, 6), (2, 1, 3)),
                    operation="conv1d",
                    options='{"padding": 1}',
                ),
            ),
        )
    ),
    _read(ComputingDealing(number=4, words=_NUMBERS.reshape(-1)), count=_NUMBERS.size),
    _read(ComputingDone()),
    _read(PeerFacts(version="0.3.0", digest="0" * 64, clock_s=1.8e9, forms="[]")),
    _read(Ping(full=True)),
)
"""Every message that checks what it reads, and those that hold nothing."""
