"""No protection: the primary sends its keys in plaintext, and every secondary links locally."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Final

import numpy as np

from securevfl.core.errors import DataError, ProtocolError
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.exact import exact_texts
from securevfl.linkage.metrics.metric import ComparedKeys, KeySpec, compare_present
from securevfl.linkage.protections import protection
from securevfl.linkage.sampling import FixedLinks, LinkSource
from securevfl.linkage.spec import LinkageSecret, LinkedPrimary, LinkedSecondary, LinkSpec
from securevfl.linkage.stage import candidates
from securevfl.linkage.stage.link_cache import LinkCache, links_key, links_to_cache
from securevfl.linkage.stage.messages import Linked, LinkingKind, OwnSimilarities
from securevfl.linkage.stage.noised_similarities import similar_links
from securevfl.linkage.stage.party_keys import key_scaler
from securevfl.transport.message import Message, TypedMessage

_MISSING: Final = -1


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LinkKeys(TypedMessage):
    """The primary's key columns with their mean and deviation."""

    KIND = LinkingKind.LINK_KEYS
    WAY = "primary to every secondary"
    COVERS: ClassVar = {"linkage": "keys lengths", "scaling statistics": "scaler"}

    keys: KeyTable
    """The primary's keys, in their own units."""

    scaler: KeyScaler | None
    """Common statistics of keys, so that one place stays one place; None for texts."""

    def to_message(self) -> Message:
        """Return it as it is sent: numbers as they are, texts as UTF-8 and lengths."""
        arrays: dict[str, np.ndarray] = {}
        for number, column in enumerate(self.keys.columns.values()):
            if column.dtype != object:
                arrays[f"number:{number}"] = column
                continue
            words = [None if text is None else text.encode() for text in column.tolist()]
            lengths = [_MISSING if word is None else len(word) for word in words]
            joined = b"".join(word for word in words if word is not None)
            arrays[f"text:{number}"] = np.frombuffer(joined, dtype=np.uint8)
            arrays[f"lengths:{number}"] = np.array(lengths, dtype=np.int64)
        if self.scaler is not None:
            arrays |= {name: np.array(values) for name, values in asdict(self.scaler).items()}
        return Message(kind=self.KIND, tensors=arrays)

    @classmethod
    def from_message(cls, message: Message, *, spec: KeySpec, rows: int) -> "LinkKeys":
        """Check received keys.

        Raises:
            ProtocolError: If columns are not what was agreed on, or statistics are impossible.
        """
        columns: dict[str, np.ndarray] = {}
        known = {"centre", "width"} if spec.are_numbers else set()
        for number, (name, kind) in enumerate(spec.kinds.items()):
            if kind == "number":
                known.add(f"number:{number}")
                gaps = spec.fields is not None
                columns[name] = message.tensor(
                    f"number:{number}", dtype=np.float64, shape=(rows,), finite=not gaps
                )
                continue
            known |= {f"lengths:{number}", f"text:{number}"}
            lengths = message.tensor(f"lengths:{number}", dtype=np.int64, shape=(rows,))
            joined = message.tensor(f"text:{number}", dtype=np.uint8, shape=(None,)).tobytes()
            columns[name] = _texts(joined, lengths, sender=message.sender)
        message.require_only(*known)
        keys = KeyTable(name=message.sender, columns=columns)
        if not spec.are_numbers:
            return cls(keys=keys, scaler=None)
        shape = (len(spec.columns),)
        scaler = KeyScaler(
            **{
                name: tuple(message.tensor(name, dtype=np.float64, shape=shape).tolist())
                for name in ("centre", "width")
            }
        )
        if not min(scaler.width) > 0:
            raise ProtocolError(
                f"{message.sender}: sent impossible statistics of keys: a width is not above 0"
            )
        return cls(keys=keys, scaler=scaler)


def _require_sound(spec: LinkSpec, keys: KeyTable, scaler: KeyScaler) -> None:
    """Check that numeric keys of another party can be compared, and that its statistics are theirs.

    Raises:
        ProtocolError: Naming the party.
    """
    try:
        # With themselves: what is wrong with them is not this party's input.
        spec.keys.metric.compare(spec.keys, keys, keys, neighbours=1)
    except DataError as error:
        raise ProtocolError(f"{keys.name}: sent impossible keys: {error}") from None
    fitted = key_scaler(spec, keys)
    assert fitted is not None, "keys with statistics are numbers"
    # Another processor may add in another order.
    near = 1e-6 * np.array(fitted.width) + 1e-9 * np.abs(fitted.centre)
    apart = np.abs(np.subtract([fitted.centre, fitted.width], [scaler.centre, scaler.width]))
    if not (apart <= near).all():
        raise ProtocolError(f"{keys.name}: sent statistics of keys that are not those of its keys")


class KeysAsTheyAre(protection.Protection):
    """What finds, where both tables may be seen, the links of the keys as they are."""

    def compare(
        self,
        spec: LinkSpec,
        primary: KeyTable,
        records: KeyTable,
        secret: LinkageSecret | None = None,
    ) -> ComparedKeys:
        """Compare keys as they are."""
        neighbours = spec.choice.neighbours
        return compare_present(spec.keys, primary, records, neighbours=neighbours)


class Plaintext(KeysAsTheyAre):
    """Keys in plaintext: every secondary sees the primary's keys."""

    name: ClassVar[str] = "none"
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "nothing of a secondary's records",
        "secondary": "the primary's keys, and their mean and deviation",
    }
    messages: ClassVar[tuple[type[TypedMessage], ...]] = (LinkKeys, Linked, OwnSimilarities)

    def link_in_process(self, tables: protection.BothTables) -> LinkedSecondary:
        """Link as every secondary does."""
        scaler = key_scaler(tables.spec, tables.primary)
        return self._link(tables.spec, tables.primary, tables.own, scaler, tables.cache)

    def link_as_primary(self, party: protection.DataParty) -> LinkedPrimary:
        """Send the primary's keys, and wait for all secondaries; see :class:`Protection`.

        Reveals:
            To every secondary: the primary's keys, their mean and deviation.
        """
        spec, names, channels = party.spec, party.spec.roles.present, party.channels
        scaler = key_scaler(spec, party.keys)
        channels.send(LinkKeys(keys=party.keys, scaler=scaler).to_message(), *names)
        parts, linked = [], []
        for name in names:
            done, rows = self.await_done(party, name)
            linked.append(rows)
            if spec.similarities is not None:
                message = OwnSimilarities.from_message(
                    done, rows=party.rows, neighbours=spec.choice.neighbours
                )
                parts.append(message.similarities)
        return protection.linked_primary(spec, party.keys, parts, linked)

    def link_as_secondary(self, party: protection.DataParty) -> LinkedSecondary:
        """Link this party's records to the primary's keys; see :class:`Protection`.

        Reveals:
            To the primary: that linkage is done; if the family reads them, noised similarities;
            and, where the file asks for it, which rows are linked.
        """
        spec = party.spec
        message = party.channels.receive(spec.roles.primary, LinkingKind.LINK_KEYS)
        received = LinkKeys.from_message(message, spec=spec.keys, rows=party.rows)
        if received.scaler is not None:
            _require_sound(spec, received.keys, received.scaler)
        linked = self._link(spec, received.keys, party.keys, received.scaler, party.cache)
        if linked.similarities is None:
            return self.report_done(party, linked, Linked())
        return self.report_done(party, linked, OwnSimilarities(similarities=linked.similarities))

    def _link(
        self,
        spec: LinkSpec,
        primary: KeyTable,
        own: KeyTable,
        scaler: KeyScaler | None,
        cache: LinkCache,
    ) -> LinkedSecondary:
        metric, similar = self.compare(spec, primary, own), None
        if spec.choice.is_fixed:
            kept = cache.get(
                links_key(spec, primary, own),
                lambda: links_to_cache(spec, lambda: candidates.find_candidates(spec, metric)),
            )
            similar = kept.similar
            source: LinkSource = FixedLinks(table=kept.ranked_links)
        else:
            source = candidates.source_of_metric(spec, metric)
            if isinstance(source, FixedLinks):
                similar = similar_links(spec, source.table)
                source = source if similar is None else FixedLinks(table=similar.links)
        made = {} if similar is None else {"similarities": similar.figures()}
        firsts, texts = candidates.rows_of_keys(spec, primary), None
        if firsts is not None and spec.keys.metric.equal_only:
            texts = exact_texts(spec.keys, primary)
        return protection.linked_secondary(
            own,
            source,
            scaler,
            rows=metric.num_rows,
            similar=similar,
            apart=spec.tells_rows
            and candidates.tells_apart(spec, source.link(np.arange(metric.num_rows))),
            meet=_meet(primary, own),
            firsts=firsts,
            texts=texts,
            figures={**metric.figures(), **made},
        )


def _meet(primary: KeyTable, own: KeyTable) -> bool:
    """Return whether numeric key columns of both parties have values in common ranges."""
    pairs = zip(primary.columns.values(), own.columns.values(), strict=True)
    return all(
        np.nanmin(mine) <= np.nanmax(theirs) and np.nanmin(theirs) <= np.nanmax(mine)
        for mine, theirs in pairs
        if mine.dtype != object and not (np.isnan(mine).all() or np.isnan(theirs).all())
    )


def _texts(joined: bytes, lengths: np.ndarray, *, sender: str) -> np.ndarray:
    sizes = np.maximum(lengths, 0)
    ends = np.cumsum(sizes)
    if lengths.min(initial=0) < _MISSING or (ends[-1] if len(ends) else 0) != len(joined):
        raise ProtocolError(f"{sender}: sent key texts whose lengths do not add up")
    column = np.empty(len(lengths), dtype=object)
    try:
        column[:] = [
            None if length == _MISSING else joined[end - length : end].decode()
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]
    except UnicodeDecodeError:
        raise ProtocolError(f"{sender}: sent key texts that are not UTF-8") from None
    return column
