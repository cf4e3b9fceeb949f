"""A proposal as the text of a federation file, with a reason for every choice."""

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from securevfl.dp.statement import bounded
from securevfl.starting.columns import Bounds
from securevfl.starting.proposal import ColumnUse, Proposal
from securevfl.starting.rows_served import WHAT_MORE_COSTS

_WIDTH: Final = 96
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")

FROM_RECORDS: Final = (
    "Ranges, words and gaps below marked so were taken from the records (--bounds-from-data): they "
    "are rounded, and stand here for every party to read. Epsilon does not cover what they tell."
)


def federation_text(proposal: Proposal) -> str:
    """Return the whole file."""
    parts = [
        _head(proposal),
        _federation(proposal),
        _model(proposal),
        _training(proposal),
        _privacy(proposal),
        _linkage(proposal),
        *(_party(proposal, number) for number in range(len(proposal.tables))),
    ]
    return "\n".join(parts)


def _head(proposal: Proposal) -> str:
    said = "Written by securevfl init. Every party gets the same file; it holds no record."
    todo = "Read it, then: securevfl check FED.toml, securevfl simulate FED.toml."
    if not proposal.ready:
        todo = (
            "Not ready to run: lines that begin with FILL IN wait for somebody who knows. "
            "securevfl check FED.toml lists them."
        )
    return _lines(_comment(f"{said} {todo}"))


def _federation(proposal: Proposal) -> str:
    return _lines(
        "[federation]",
        f"name = {_text(proposal.name)}",
        f"task = {_text(proposal.task)}{_aside(proposal.task_reason)}",
    )


def _model(proposal: Proposal) -> str:
    reads, why = "false", "keys are no positions"
    if proposal.keys.numeric:
        reads, why = "true", "the primary's model may read where its own rows are"
    hidden = "# FILL IN: hidden = " + _aside("how many classes the label has")
    if proposal.classes is not None:
        halves = "one for the label's lower half, one for its upper"
        each = halves if proposal.task == "regression" else "one number for each class"
        hidden = f"hidden = {proposal.classes}" + _aside(each)
    return _lines(
        _comment(
            "Where a joint model gained over the primary alone at epsilon 8 and below, it had "
            "these settings (docs/votes.md says where it did not): each record votes for classes, "
            "the votes of all secondaries add up, and the top model adds them to what the primary "
            "knows by itself."
        ),
        "[model]",
        'family = "fet"',
        f"neighbours = {proposal.keys.neighbours}" + _aside(_why_neighbours(proposal)),
        hidden,
        "heads = 1" + _aside("must divide hidden; nothing attends here"),
        'release = "pooled"' + _aside("one vector a row leaves, not one a link"),
        'top = "tied"' + _aside("the primary's own model, plus weighed votes"),
        f"keys_as_features = {reads}" + _aside(why),
        "",
        _comment(
            "Votes are fitted to sums of records by class, so secondaries learn something of the "
            "primary's labels: here each training row's, by randomised response. With a party "
            '[[party]] name = "dealer", role = "dealer" write "shares": then they see no row\'s '
            '(docs/votes.md). method = "principal" with top = "additive" needs no label.'
        ),
        "[encoder]",
        'method = "votes"',
        'labels = "randomised"',
        "label_epsilon = 2.0" + _aside("for one row's label, against all secondaries together"),
    )


def _why_neighbours(proposal: Proposal) -> str:
    if proposal.keys.neighbours == 1:
        return "K: an id is at most one record of a secondary"
    return "K: a row's sum is cut to what K records can say"


def _training(proposal: Proposal) -> str:
    lines = ["[training]", "epochs = 50" + _aside("at most; the best one is kept")]
    if proposal.some_unlabelled:
        lines.append('empty_labels = "unlabelled"' + _aside("some rows have no label"))
    return _lines(*lines)


def _privacy(proposal: Proposal) -> str:
    said = bounded(
        unit="secondary-record",
        encoder="frozen",
        epsilon=proposal.epsilon,
        delta=proposal.delta,
        parties=len(proposal.tables) - 1,
        colluding=0,
        links_per_record=1,
    )
    return _lines(
        _comment(f"What is promised: {said.text}"),
        "[privacy]",
        f"epsilon = {float(proposal.epsilon)!r}",
        f"delta = {proposal.delta:g}" + _aside("well below 1 over the records of a table"),
        'encoder = "frozen"' + _aside("made before training; each row is released once"),
        'unit = "secondary-record"',
        *_served(proposal),
        "links_per_record = 1" + _aside("one record moves one row at most"),
    )


def _served(proposal: Proposal) -> list[str]:
    """Return what the tables tell of a record's rows, if what they tell may stand in the file."""
    if not proposal.bounds_from_data or not proposal.served:
        return []
    told = [f"Of {name}, {found.in_words()}." for name, found in proposal.served.items()]
    if any(found.few for found in proposal.served.values()):
        told.append(f"{WHAT_MORE_COSTS}.")
    told.append("Taken from the keys (--bounds-from-data); epsilon does not cover it.")
    return [_comment(" ".join(told))]


def _linkage(proposal: Proposal) -> str:
    truth = []
    if proposal.truth is not None:
        truth = [f"truth = {_text(proposal.truth)}" + _aside("tells how good links are")]
    return _lines(
        *(_comment(f"Keys: {reason}.") for reason in proposal.keys.reasons),
        _comment(
            'protection = "none": every secondary sees the keys of the primary\'s rows. "bloom", '
            '"shares" and "paillier" hide them, with the help of a party without a table '
            "(docs/linkage.md); check says who learns what."
        ),
        *([] if proposal.keys.shown is None else [_comment(f"Warning: {proposal.keys.shown}.")]),
        "[linkage]",
        f"metric = {_text(proposal.keys.metric)}",
        'protection = "none"',
        *(
            f"{name} = {_text(value) if isinstance(value, str) else 'true'}"
            + _aside("the tables spell equal keys differently")
            for name, value in proposal.spelling.items()
        ),
        'choose = "records"' + _aside("a record joins its nearest row: half the noise"),
        *truth,
    )


def _party(proposal: Proposal, number: int) -> str:
    table = proposal.tables[number]
    uses = proposal.uses[table.name]
    lines = ["[[party]]", f"name = {_text(table.name)}"]
    if number:
        lines.append('role = "secondary"')
    else:
        lines += [
            'role = "primary"',
            'address = "127.0.0.1:7431"'
            + _aside("where the primary listens; on several machines, its own name"),
        ]
    local = ""
    if PurePath(table.data).is_absolute():
        local = _aside("a path of one machine; relative to --data-root, all parties can use one")
    lines += [
        f"data = {_text(table.data)}{local}",
        f"key = {_texts(proposal.keys.columns[table.name])}",
    ]
    if not number:
        lines.append(f"label = {_text(proposal.label)}")
    excluded = [use for use in uses if use.use == "excluded"]
    if excluded:
        lines.append("exclude = [")
        lines += [f"  {_text(use.column.name)},{_aside(use.why)}" for use in excluded]
        lines.append("]")
    names = ", ".join(use.column.name for use in proposal.features(table.name))
    lines += [_comment(f"Features: {names}.")]
    if number:
        lines += _declarations(proposal, table.name)
    return _lines(*lines)


def _declarations(proposal: Proposal, party: str) -> list[str]:
    """Return a secondary's scaling: what is known of its columns without looking at the records."""
    features = proposal.features(party)
    lines = ['scaling = "bounds"' + _aside("a mean of the records would tell of them")]
    told = [use.column.name for use in features if use.may_be_missing]
    gaps = [use.column.name for use in features if use.gaps_open]
    if told:
        lines.append(f"missing_columns = {_texts(told)}" + _aside("may have gaps"))
    if gaps:
        lines += [
            _comment(
                f"FILL IN: missing_columns = {_texts([*told, *gaps])} if all know that these "
                f"may have gaps; else fill the gaps in, or exclude the columns"
            )
        ]
    if proposal.bounds_from_data:
        lines += [_comment(FROM_RECORDS)]
    lines.append("[party.bounds]" + _aside("values outside are cut off"))
    lines += [line for use in features if (line := _bounds(use)) is not None]
    words = [use for use in features if use.words is not None or _open_words(use)]
    if words:
        lines.append("[party.categories]" + _aside('"other" stands for all further words'))
        lines += [_categories(use) for use in words]
    return lines


def _open_words(use: ColumnUse) -> bool:
    return use.open and use.column.kind == "words"


def _bounds(use: ColumnUse) -> str | None:
    name = _key(use.column.name)
    if use.bounds is not None:
        return f"{name} = {_pair(use.bounds)}{_aside(use.source)}"
    if not use.open or use.column.kind == "words":
        return None
    example = '["2015-01-01", "2025-12-31"]' if use.column.kind == "date" else "[LOW, HIGH]"
    return f"# FILL IN: {name} = {example}, known without looking at the records"


def _categories(use: ColumnUse) -> str:
    name = _key(use.column.name)
    if use.words is None:
        return f'# FILL IN: {name} = ["WORD", "WORD", "other"], known without looking'
    return f"{name} = {_texts(use.words)}{_aside(use.source)}"


def _pair(bounds: Bounds) -> str:
    return "[" + ", ".join(_text(b) if isinstance(b, str) else f"{b:.12g}" for b in bounds) + "]"


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    lines = textwrap.wrap(_plain(text), width=_WIDTH, break_on_hyphens=False)
    return "\n".join(f"# {line}" for line in lines)


def _aside(text: str) -> str:
    return f"  # {_plain(text)}"


def _plain(text: str) -> str:
    """Return text that cannot end a comment: columns' names are whatever a table says."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _text(value: str) -> str:
    # A JSON text is a TOML text, but for DEL, which TOML wants written out.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _texts(values: Sequence[str]) -> str:
    return "[" + ", ".join(map(_text, values)) + "]"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
