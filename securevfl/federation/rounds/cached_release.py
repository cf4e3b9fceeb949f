"""A frozen encoder's release in parts, and its saved answers, from which a cut run continues.

In the secondary's folder ``release.pt`` holds what all its rows are a function of: the encoder,
fitted or not, the links within the secret sample, which rows have one key, and the secret that
symbols follow from; it is there before the first row is charged.
The files in ``answers`` are for the last rounds that were asked for, in turns, as many as the
primary may have announced and not kept (:data:`securevfl.federation.run_plan.ROUNDS_AHEAD`). Each
holds the rows, from before they are charged, and the noised words that answered them, from before
they are sent. So whenever a crash comes:

- rows that are not booked were never released: they are charged and released;
- a round's rows, booked and kept without words, were charged and never sent: they are released
  now, and paid for already;
- a round's rows with their words may have been sent: the same words are sent once more. The
  sum that the primary gets is the one that it may have already, under fresh masks: nothing is
  released by it that was not released before;
- any other row that is booked is refused, and so is everything once one of the files is lost.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import itemgetter
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from securevfl.core.errors import PrivacyError
from securevfl.federation.checkpoint import DamagedError, StateFolder
from securevfl.federation.run_plan import ROUNDS_AHEAD
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.links import LinkTable
from securevfl.linkage.sampling import EligiblePairs, FixedLinks, LinkSource, PickedLinks
from securevfl.mpc.codec import Words

_RELEASE: Final = "release.pt"
_ANSWERS: Final = tuple(f"answers/{number}.pt" for number in range(1, ROUNDS_AHEAD + 1))


@dataclass(eq=False)
class CachedRelease:
    """One secondary's release in parts: its links, its charges, and its last answers."""

    files: StateFolder | None
    """Folder of the secondary's answers in this run; None keeps none."""
    ledger: Ledger
    """Open ledger of the secondary."""
    _: KW_ONLY
    bottom: nn.Module
    """Encoder of the secondary."""
    links: LinkSource
    """Links of the secondary in this session."""
    records: Mapping[str, Tensor]
    """Tensors of the secondary's table that the encoder reads, by name."""
    firsts: Int64[np.ndarray, " rows"] | None = None
    """First row of each row's key, where rows of one key are released once; None: every row."""
    fit: Callable[[], None] | None = None
    """Charges for the encoder and fits it; None if it is not fitted."""

    def __post_init__(self) -> None:
        """Read the answers and the encoder that an earlier session of the run has saved."""
        self._secret = b""
        """Secret of this release, once it is settled."""
        self._booked = set(self.ledger.released_rows.tolist())
        """Rows of this run that were charged, in earlier sessions and in this one."""
        kept = [state for state in map(self._read, _ANSWERS) if state is not None]
        self._answers = {_rows_of(state).tobytes(): state for state in kept}
        """Answers of earlier sessions, until rows are asked for that are new."""
        # Rows that were noted and not booked come next, and are noted in the same place.
        done = [
            entry["place"] for entry in kept if self._booked.issuperset(_rows_of(entry).tolist())
        ]
        self._next = max(done, default=-1) + 1
        """How many rounds were answered or paid for, so far; which file comes next."""
        self._place = self._next
        self._paid: Int64[np.ndarray, " batch"] | None = None

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of what is booked."""
        return self.ledger.epsilon_spent

    def link(self, rows: Int64[np.ndarray, " chosen"]) -> LinkTable:
        """Return the links of the given primary rows, the same in every session of the run."""
        return self.links.link(rows)

    def first_rows(self, rows: Int64[np.ndarray, " batch"]) -> Int64[np.ndarray, " batch"]:
        """Return the first row of each row's key, the same in every session of the run."""
        return rows if self.firsts is None else self.firsts[rows]

    def keep_symbols(
        self, firsts: Int64[np.ndarray, " batch"], drawn: Int64[np.ndarray, " batch"]
    ) -> Int64[np.ndarray, " batch"]:
        """Return what was drawn: it follows from what is kept."""
        del firsts
        return drawn

    def take_secret(self) -> bytes:
        """Return the secret that draws follow from, of this release alone.

        Raises:
            PrivacyError: If the release is not settled.
        """
        if not self._secret:
            raise PrivacyError("rows were asked for before it was fixed what they rest on")
        return self._secret

    def again(self, rows: Int64[np.ndarray, " batch"]) -> Words | None:
        """Return what these rows were answered with before; None if they still have to be released.

        Only a resumed session's first rounds can be some that were asked for before.

        Raises:
            PrivacyError: If a row of them was released, and not with one of the last answers.
        """
        known = self._booked.intersection(rows.tolist())
        if not known:
            self._answers.clear()
            return None
        kept = self._answers.pop(rows.tobytes(), None)
        if kept is None or len(known) < len(rows):
            raise _released_before(len(known))
        words: Tensor | None = kept["words"]
        if words is None:
            self._paid, self._place = rows, kept["place"]
        return words

    def settle(self) -> None:
        """Fix what the release rests on before its first row, or go back to what was fixed.

        A fitting that was booked, and lost before a row was, is made once more without a charge:
        nobody has learned anything of it.

        Raises:
            BudgetExceededError: If the budget does not cover the fitting.
            PrivacyError: If rows were released and what they rest on is lost, or the table changed.
        """
        state = self._read(_RELEASE)
        if state is None:
            if self._booked:
                raise PrivacyError(
                    f"rows of this run were released, and {_RELEASE}, which says with what, is "
                    f"missing or damaged; {_NOT_AGAIN}"
                )
            if self.fit is not None:
                self.fit()
            keys = {"secret": torch.frombuffer(bytearray(os.urandom(_SECRET)), dtype=torch.uint8)}
            if self.firsts is not None:
                keys["firsts"] = torch.from_numpy(self.firsts)
            encoder, links = self.bottom.state_dict(), _state_of(self.links)
            state = {"encoder": encoder, "links": links, "keys": keys}
            state["digest"] = self._digest(state)
            self._write(_RELEASE, state)
        elif self._digest(state) != state["digest"]:
            raise PrivacyError(
                f"the table, its keys or {_RELEASE} are others than those that rows of this run "
                f"were released from; restore them, or {_ANOTHER}"
            )
        else:
            self.bottom.load_state_dict(state["encoder"])
            self.links = _links_from(state["links"])
        self.ledger.require_same_release(state["digest"])
        firsts = state["keys"].get("firsts")
        self.firsts = None if firsts is None else firsts.numpy()
        # With the digest, so that a secret which was copied gives another model other draws.
        secret = state["keys"]["secret"].numpy().tobytes()
        self._secret = hashlib.blake2b(
            state["digest"].encode(), key=secret, digest_size=32
        ).digest()

    @property
    def encoder_fixed(self) -> bool:
        """Whether what the release rests on was fixed, in this session or before it."""
        return self._read(_RELEASE) is not None

    def restore(self) -> None:
        """Go back to the encoder of the rows that were released, if any were."""
        state = self._read(_RELEASE)
        if state is not None:
            self.bottom.load_state_dict(state["encoder"])

    def charge(
        self, *, round_number: int, rows: Int64[np.ndarray, " batch"], purpose: str
    ) -> float:
        """Note what is asked for, then book it; see :meth:`Ledger.charge`.

        Rows that were booked when a crash came, and never answered, are not booked again.

        Raises:
            PrivacyError: If a row of them was released; all answers stay as they are then.
        """
        if self._paid is not None and np.array_equal(self._paid, rows):
            self._paid = None
            return self.ledger.epsilon_spent
        asked = set(rows.tolist())
        if not self._booked.isdisjoint(asked):
            raise _released_before(len(self._booked & asked))
        self._place, self._next = self._next, self._next + 1
        self._write_answer(rows, None)
        epsilon = self.ledger.charge(round_number=round_number, rows=rows, purpose=purpose)
        self._booked |= asked
        return epsilon

    def keep_answer(self, rows: Int64[np.ndarray, " batch"], words: Words) -> None:
        """Keep an answer; it is on the disk when this returns, and may be sent then."""
        self._write_answer(rows, words.cpu())

    def _write_answer(self, rows: Int64[np.ndarray, " batch"], words: Tensor | None) -> None:
        state = {"place": self._place, "rows": torch.from_numpy(rows), "words": words}
        self._write(_ANSWERS[self._place % ROUNDS_AHEAD], state)

    def _read(self, name: str) -> dict[str, Any] | None:
        if self.files is None:
            return None
        try:
            state = self.files.read(name)
        except (FileNotFoundError, DamagedError):
            return None
        whole = _is_release if name == _RELEASE else _is_answer
        return state if whole(state) else None

    def _write(self, name: str, state: Mapping[str, Any]) -> None:
        if self.files is not None:
            self.files.write(name, state)

    def _digest(self, state: Mapping[str, Any]) -> str:
        """Return the hash of all that a row's release is a function of, but for its noise."""
        settings = self.files.settings_digest if self.files else ""
        made = hashlib.sha256(settings.encode())
        for part in (self.records, state["encoder"], state["links"], state["keys"]):
            for name, value in sorted(part.items()):
                array = value.detach().cpu().contiguous().numpy()
                made.update(f"{name} {array.dtype} {array.shape}\n".encode())
                made.update(array.tobytes())
        return made.hexdigest()


def _is_release(state: Mapping[str, Any]) -> bool:
    encoder, links, keys = (state.get(name) for name in ("encoder", "links", "keys"))
    return (
        isinstance(state.get("digest"), str)
        and isinstance(encoder, dict)
        and isinstance(links, dict)
        and isinstance(keys, dict)
        and set(links) in (_FIXED, _PICKED)
        and set(keys) in ({"secret"}, {"secret", "firsts"})
        and all(isinstance(name, str) for name in encoder)
        and all(
            isinstance(value, Tensor) for part in (encoder, links, keys) for value in part.values()
        )
    )


def _is_answer(state: Mapping[str, Any]) -> bool:
    rows, words, place = state.get("rows"), state.get("words", ""), state.get("place")
    return (
        isinstance(rows, Tensor)
        and rows.dtype == torch.int64
        and rows.ndim == 1
        and isinstance(words, Tensor | None)
        and type(place) is int
        and place >= 0
    )


def _rows_of(state: Mapping[str, Any]) -> Int64[np.ndarray, " batch"]:
    return state["rows"].contiguous().numpy()


_SECRET: Final = 32
_FIXED: Final = {"indices", "distances"}
_PICKED: Final = {"starts", "records", "distances", "sample"}
_ANOTHER: Final = "start another run with another --out, which is charged to the table's total"
_NOT_AGAIN: Final = f"and under this promise no row is released twice; {_ANOTHER}"


def _released_before(rows: int) -> PrivacyError:
    return PrivacyError(
        f"{rows} of the rows that the primary asks for were released before in this run, "
        f"{_NOT_AGAIN}"
    )


def _state_of(links: LinkSource) -> dict[str, Tensor]:
    if isinstance(links, PickedLinks):
        arrays = {
            "starts": links.pairs.starts,
            "records": links.pairs.records,
            "distances": links.pairs.distances,
            "sample": links.sample,
        }
    else:
        assert isinstance(links, FixedLinks), "a frozen run samples once"
        arrays = {"indices": links.table.indices, "distances": links.table.distances}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _links_from(state: Mapping[str, Tensor]) -> LinkSource:
    arrays = {name: value.numpy() for name, value in state.items()}
    if "sample" in arrays:
        sample = arrays.pop("sample")
        return PickedLinks(pairs=EligiblePairs(**arrays), sample=sample)
    return FixedLinks(table=LinkTable(**arrays))


@dataclass(eq=False)
class CountedRelease:
    """One secondary's answers to requests: a record that had its releases leaves its slot empty.

    The row then has the other records, or noise alone, and nobody is told. What one record adds to
    all answers together, whatever is asked for and in whatever order, is at most N times what it
    adds to a row: docs/privacy.md, section 3. Rows of one key that are released once count once.
    """

    links: LinkSource
    """Source of the request's links, in which records chose rows."""
    ledger: Ledger
    """The secondary's own, which counts how often each record was released."""
    most: int
    """N, rows that a record may be released in."""
    firsts: Int64[np.ndarray, " rows"] | None = None
    """First row of each row's key, where rows of one key are released once; None: every row."""
    texts: Sequence[str | None] | None = None
    """Each row's key, where a key's records follow from it and the table alone: it is answered N
    times, and then as the last time. None: each request has answers of its own."""
    _secret: bytes = field(default_factory=lambda: os.urandom(_SECRET), init=False, repr=False)
    """Secret that draws follow from, of this request alone."""
    _charged: LinkTable | None = field(default=None, init=False)
    """Links of the round that is paid for."""
    _admitted: dict[int, Int64[np.ndarray, " records"]] = field(default_factory=dict, init=False)
    """Records that take part in each first row that was charged."""
    _symbols: dict[int, int] = field(default_factory=dict, init=False)
    """Symbol of each first row in this request."""

    def first_rows(self, rows: Int64[np.ndarray, " batch"]) -> Int64[np.ndarray, " batch"]:
        """Return the first row of each row's key."""
        return rows if self.firsts is None else self.firsts[rows]

    def take_secret(self) -> bytes:
        """Return the secret that draws follow from, of this request alone."""
        return self._secret

    def charge(
        self, *, round_number: int, rows: Int64[np.ndarray, " batch"], purpose: str
    ) -> float:
        """Count the round's records, then book it; see :meth:`Ledger.charge`.

        Raises:
            PrivacyError: If the counts were altered under this process.
        """
        firsts = self.first_rows(rows)
        links = self.links.link(firsts)
        # Rows of a key that was charged, in this round or before it, are what its first one is.
        places = dict(zip(firsts[::-1].tolist(), range(len(rows) - 1, -1, -1), strict=True))
        fresh = [
            place
            for first, place in sorted(places.items(), key=itemgetter(1))
            if first not in self._admitted
        ]
        counted = np.zeros((len(rows), 1), dtype=np.bool_)
        counted[[place for place in fresh if not self._repeats(int(firsts[place]))]] = True
        taking = links.only(np.broadcast_to(counted, links.indices.shape))
        admitted = self.ledger.record_counts.admit(taking.indices, most=self.most)
        epsilon = self.ledger.charge(round_number=round_number, rows=rows, purpose=purpose)
        for place in fresh:
            self._admitted[int(firsts[place])] = links.indices[place][admitted[place]]
        kept = [
            np.isin(records, self._admitted[first])
            for first, records in zip(firsts.tolist(), links.indices, strict=True)
        ]
        self._charged = links.only(np.array(kept))
        return epsilon

    def _repeats(self, first: int) -> bool:
        """Whether a key had its answers, and gets the last one again."""
        text = None if self.texts is None else self.texts[first]
        return text is not None and self.ledger.record_counts.answers_to(text) >= self.most

    def keep_symbols(
        self, firsts: Int64[np.ndarray, " batch"], drawn: Int64[np.ndarray, " batch"]
    ) -> Int64[np.ndarray, " batch"]:
        """Return the symbol of each row's key in this request; new ones are on the disk then.

        Raises:
            PrivacyError: If what was kept was altered under this process.
            StorageError: If the file cannot be written; nothing may be sent then.
        """
        counts, new = self.ledger.record_counts, dict[str, int]()
        for first, symbol in zip(firsts.tolist(), drawn.tolist(), strict=True):
            if first in self._symbols:
                continue
            text = None if self.texts is None else self.texts[first]
            if text is not None and self._repeats(first):
                self._symbols[first] = counts.last_answer_to(text)
                continue
            self._symbols[first] = symbol
            if text is not None:
                new[text] = symbol
        if self.texts is not None:
            counts.keep_answers(new)
        return np.array([self._symbols[first] for first in firsts.tolist()], dtype=np.int64)

    def link(self, rows: Int64[np.ndarray, " chosen"]) -> LinkTable:
        """Return the links of the round that is charged, without those that had their releases.

        Raises:
            PrivacyError: If other rows than these were charged.
        """
        if self._charged is None or len(rows) != self._charged.num_rows:
            raise PrivacyError("links were asked for of rows that were not charged")
        return self._charged
