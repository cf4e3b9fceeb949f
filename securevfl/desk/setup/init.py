"""A proposed federation file, with a reason for every choice."""

import contextlib
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, Final

from securevfl.config.encoder import recommend
from securevfl.config.federation import FederationConfig, key_spec, link_spec
from securevfl.config.reading import parse_federation
from securevfl.config.sections import TrainingSettings
from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError, SecureVflError
from securevfl.core.formatting import toml_key, toml_text, toml_value
from securevfl.core.settings import read_settings
from securevfl.data.doubts import TableInUse, ask
from securevfl.data.sources.read import holds_cells, ignore_note, read_frame, with_dates
from securevfl.data.sources.settings import (
    SOURCE_SUFFIX,
    Reading,
    Wanted,
    as_options,
    is_source_file,
    require_own_tables,
)
from securevfl.data.tables import KeyTable, default_validation_fraction
from securevfl.desk.setup import check, proposed_columns, spelling
from securevfl.desk.setup.party_check import announce_reading
from securevfl.desk.setup.proposal import ColumnUse, Proposal, Wishes, propose, table_in_use
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.stage.party_keys import read_keys

_WIDTH: Final = 96


FROM_RECORDS: Final = (
    "Ranges, words and gaps below marked so were taken from the records (--bounds-from-data): they "
    "are rounded, and stand here for every party to read. Epsilon does not cover what they tell."
)


def federation_text(proposal: Proposal) -> str:
    """Return the whole file."""
    # No party of the proposal is a dealer.
    chosen = recommend(classes=proposal.classes, metric=proposal.keys.metric, dealer=False)
    parts = [
        _head(proposal),
        _federation(proposal),
        _model(proposal, chosen),
        _training(proposal, chosen["training"]),
        _privacy(proposal, chosen["privacy"]),
        _linkage(proposal, chosen["linkage"]),
        *(_party(proposal, number) for number in range(len(proposal.tables))),
    ]
    return "\n".join(parts)


def _head(proposal: Proposal) -> str:
    notice = "Written by securevfl init. Every party gets the same file; it holds no record."
    todo = "Read it, then: securevfl check FED.toml, securevfl simulate FED.toml."
    if not proposal.ready:
        todo = (
            "Not ready to run: complete the lines that begin with FILL IN. "
            "securevfl check FED.toml lists them."
        )
    return _lines(_comment(f"{notice} {todo}"))


def _federation(proposal: Proposal) -> str:
    return _lines(
        "[federation]",
        f"name = {toml_value(proposal.wishes.name)}",
        f"task = {toml_value(proposal.task)}{_aside(proposal.task_reason)}",
    )


def _model(proposal: Proposal, chosen: Mapping[str, Mapping[str, Any]]) -> str:
    model, encoder = {"keys_as_features": True, **chosen["model"]}, chosen["encoder"]
    why = "keys are no positions"
    if proposal.keys.numeric:
        why = "the primary's model may read where its own rows are"
    why_so_many, neighbours = "K: a row's sum is cut to what K records can say", proposal.neighbours
    if proposal.keys.neighbours > neighbours:
        why_so_many = "K: a row has one record; the best of several would cost more of epsilon"
    elif neighbours == 1:
        why_so_many = "K: the nearest record is far nearer than the next"
        if proposal.keys.metric == "exact":
            why_so_many = "K: an id is at most one record of a secondary"
    numbers = f"{check.FILL_IN} numbers = " + _aside("how many classes the label has")
    if proposal.classes is not None:
        each = "one number for each class"
        if proposal.classes == 2:
            each = "one score, sent as one of a few cells by randomised response"
        numbers = _setting(model, "numbers", each)
    return _lines(
        _comment(
            "Where a joint model gained over the primary alone at epsilon 8 and below, it had "
            "these settings (docs/results.md says where it did not): each record gets a score, or "
            "one for every class, from noised class means; scores of all secondaries add up, and "
            "the top model adds them to the primary's own model."
        ),
        "[model]",
        _setting(model, "family"),
        f"neighbours = {neighbours}" + _aside(why_so_many),
        numbers,
        _setting(model, "top", "own model plus weighted class scores; trees where they add"),
        _setting(model, "keys_as_features", why),
        "",
        _comment(
            "Class means need labels, so secondaries learn something of the primary's: here each "
            'training row\'s, by randomised response. With a party [[party]] name = "dealer", '
            'role = "dealer" write labels = "shares": then they see no row\'s label '
            '(docs/class-means.md). method = "principal" with top = "additive" needs no label.'
        ),
        "[encoder]",
        _setting(encoder, "method", "class means"),
        _setting(encoder, "labels"),
        "label_epsilon = 2.0" + _aside("for one row's label, against all secondaries together"),
    )


def _training(proposal: Proposal, chosen: Mapping[str, Any]) -> str:
    lines = [
        "[training]",
        "epochs = 50" + _aside("at most; the best one is kept"),
        _setting(chosen, "batch_size", "rows of a message; nothing trains by batches"),
    ]
    rows = proposal.tables[0].rows
    if rows is not None:
        share = default_validation_fraction(rows, test_fraction=TrainingSettings().test_fraction)
        lines.append(f"validation_fraction = {share:.3g}" + _aside("more where rows are few"))
    if proposal.split_column is not None:
        column = toml_value(proposal.split_column)
        lines.append('split = "group"' + _aside("rows of one key stay on one side of the split"))
        lines.append(f"split_column = {column}")
    if proposal.some_unlabelled:
        lines.append('empty_labels = "unlabelled"' + _aside("some rows have no label"))
    return _lines(*lines)


def _privacy(proposal: Proposal, chosen: Mapping[str, Any]) -> str:
    return _lines(
        _comment("What this promises, in a sentence to sign: securevfl check FED.toml."),
        "[privacy]",
        f"epsilon = {float(proposal.wishes.epsilon)!r}",
        f"delta = {proposal.delta:g}" + _aside("well below 1 over the records of a table"),
        _setting(chosen, "encoder", "made before training; each row is released once"),
        _comment(
            "A secret sample of records (sampling_rate below 1) saves noise where encoders train "
            'behind it in many rounds (encoder = "dp-trained"); class means use every record and '
            "refuse it."
        ),
        'unit = "secondary-record"',
        _setting(chosen, "links_per_record", "one record moves one row at most"),
    )


def _protection(proposal: Proposal) -> list[str]:
    keys, more = proposal.keys, ""
    if keys.protection == "none":
        more = (
            ' "bloom", "shares" and "paillier" hide them, with the help of a party without a table '
            "(docs/linkage.md); check says who learns what."
        )
    text = f'protection = "{keys.protection}": {keys.protection_reason}.{more}'
    shown = keys.key_warning
    return [_comment(text), *([] if shown is None else [_comment(f"Warning: {shown}.")])]


def _linkage(proposal: Proposal, chosen: Mapping[str, Any]) -> str:
    truth = []
    if proposal.wishes.truth is not None:
        truth = [
            f"truth = {toml_value(proposal.wishes.truth)}" + _aside("for the quality of links")
        ]
    return _lines(
        *(_comment(f"Keys: {reason}.") for reason in proposal.keys.reasons),
        *_protection(proposal),
        "[linkage]",
        f"metric = {toml_value(proposal.keys.metric)}",
        f"protection = {toml_value(proposal.keys.protection)}",
        *(
            f"{name} = {toml_value(value)}" + _aside("the tables spell equal keys differently")
            for name, value in proposal.spelling.items()
        ),
        _setting(chosen, "choose", "a record joins its nearest row: half the noise"),
        *truth,
    )


def _party(proposal: Proposal, number: int) -> str:
    table = proposal.tables[number]
    uses = proposal.uses[table.name]
    lines = ["[[party]]", f"name = {toml_value(table.name)}"]
    if number:
        lines.append('role = "secondary"')
    else:
        lines += [
            'role = "primary"',
            'address = "127.0.0.1:7431"'
            + _aside("where the primary listens; on several machines, its own name"),
        ]
    data, reading = [f"data = {toml_value(table.data)}"], _reading(table.reading)
    if _lies_elsewhere(table):
        data, reading = [f"data = {toml_value(_own_file(table))}{_aside('says where it lies')}"], []
    lines += [*data, *reading, f"key = {toml_value(proposal.keys.columns[table.name])}"]
    if not number:
        lines.append(f"label = {toml_value(proposal.wishes.label)}")
        if proposal.wishes.positive is not None:
            lines.append(
                f"positive = {toml_value(proposal.wishes.positive)}"
                + _aside("what probabilities are about")
            )
    excluded = [use for use in uses if use.use == "excluded"]
    if excluded:
        lines.append("exclude = [")
        lines += [f"  {toml_value(use.column.name)},{_aside(use.why)}" for use in excluded]
        lines.append("]")
    names = ", ".join(use.column.name for use in proposal.features(table.name))
    lines += [_comment(f"Features: {names}.")]
    if number:
        lines += _declarations(proposal, table.name)
    return _lines(*lines)


def own_files(proposal: Proposal) -> dict[str, str]:
    """Return the files of this machine alone that name tables elsewhere, by name, with content."""
    return {
        _own_file(table): toml_text({"file": table.data, **table.reading.given_settings})
        for table in proposal.tables
        if _lies_elsewhere(table)
    }


def _own_file(table: proposed_columns.Table) -> str:
    return f"{table.name}{SOURCE_SUFFIX}"


def _lies_elsewhere(table: proposed_columns.Table) -> bool:
    return PurePath(table.data).is_absolute()


def _reading(reading: Reading) -> list[str]:
    """Return the ``reading`` line of a party, if its file needs one."""
    if not reading.given_settings:
        return []
    return [f"reading = {toml_value(reading.given_settings)}" + _aside("how the file is written")]


def _declarations(proposal: Proposal, party: str) -> list[str]:
    """Return the lines of a secondary's scaling, with the declared ranges and words."""
    features = proposal.features(party)
    lines = ['scaling = "bounds"' + _aside("a mean of the records would tell of them")]
    names = [use.column.name for use in features if use.may_be_missing]
    gaps = [use.column.name for use in features if use.gaps_open]
    if names:
        lines.append(f"missing_columns = {toml_value(names)}" + _aside("may have gaps"))
    if gaps:
        lines += [
            _comment(
                f"{check.FILL_IN.removeprefix('# ')} missing_columns = "
                f"{toml_value([*names, *gaps])} if all know that these may have gaps; else fill "
                f"them in, or exclude the columns"
            )
        ]
    if proposal.wishes.bounds_from_data:
        lines += [_comment(FROM_RECORDS)]
    lines.append("[party.bounds]" + _aside("values outside are cut off"))
    lines += [line for use in features if (line := _bounds(use)) is not None]
    words = [
        use
        for use in features
        if use.words is not None or (use.open and use.column.kind == "words")
    ]
    if words:
        lines.append("[party.categories]" + _aside('"other" stands for all further words'))
        lines += [_categories(use) for use in words]
    return lines


def _bounds(use: ColumnUse) -> str | None:
    name = toml_key(use.column.name)
    if use.bounds is not None:
        ends = (toml_value(end) if isinstance(end, str) else f"{end:.12g}" for end in use.bounds)
        return f"{name} = [{', '.join(ends)}]{_aside(use.source)}"
    if not use.open or use.column.kind == "words":
        return None
    example = '["2015-01-01", "2025-12-31"]' if use.column.kind == "date" else "[LOW, HIGH]"
    unit = f", as written before {use.column.unit!r}" if use.column.unit else ""
    return f"{check.FILL_IN} {name} = {example}, known without looking at the records{unit}"


def _categories(use: ColumnUse) -> str:
    name = toml_key(use.column.name)
    if use.words is None:
        return f'{check.FILL_IN} {name} = ["WORD", "WORD", "other"], known without looking'
    return f"{name} = {toml_value(use.words)}{_aside(use.source)}"


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    lines = textwrap.wrap(_plain(text), width=_WIDTH, break_on_hyphens=False)
    return "\n".join(f"# {line}" for line in lines)


def _setting(values: Mapping[str, Any], name: str, why: str = "") -> str:
    """Return the line of a setting, with the reason for its value."""
    return f"{name} = {toml_value(values[name])}" + (_aside(why) if why else "")


def _aside(text: str) -> str:
    return f"  # {_plain(text)}"


def _plain(text: str) -> str:
    """Return printable text, which can't end a comment; column names come from tables."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def look_at(
    path: Path,
    *,
    declared: proposed_columns.Declared,
    root: Path,
    show: Callable[[str], None] = ignore_note,
) -> proposed_columns.Table:
    """Read a table on this machine and describe its columns.

    Args:
        path: The table.
        declared: The user's declarations of columns.
        root: Folder at which the federation file's relative paths start.
        show: Receives a line about a table that takes long to read.

    Raises:
        DataError: If it can't be read.
    """
    where, name = f"table {path}", party_name(path)
    if is_source_file(path) and not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{where}: must lie below the folder of --out, {root}; copy it there")
    reading, wanted = declared.reading_of(name), Wanted(words=declared.words)
    announce_reading(path, name, show)
    try:
        frame = read_frame(path, where=where, reading=reading, wanted=wanted)
    except DataError as error:
        raise DataError(as_options(str(error))) from None
    if reading.dates is None and holds_cells(path):
        form = proposed_columns.date_form(frame)
        if form is not None:
            reading = replace(reading, dates=form)
            frame = with_dates(frame, reading, wanted, where=where)
    table = proposed_columns.describe_table(
        frame,
        name=name,
        data=_from(root, path),
        types=proposed_columns.declared_types(path),
        declared=declared,
        reading=reading,
    )
    return proposed_columns.with_key_forms(
        table,
        lambda names: read_frame(
            path, where=where, reading=reading, wanted=replace(wanted, as_text=names)
        ),
    )


def propose_file(
    primary: Path,
    secondaries: Sequence[Path],
    lists: Sequence[Path],
    *,
    wishes: Wishes,
    declared: proposed_columns.Declared,
    root: Path,
    show: Callable[[str], None] = ignore_note,
) -> tuple[Proposal, str]:
    """Propose a federation; return it with its file's text.

    Args:
        primary: The primary's table, or its column list (``.json``).
        secondaries: Tables of secondaries.
        lists: Column lists of further secondaries.
        wishes: The user's requests.
        declared: The user's declarations of columns.
        root: Folder at which the file's relative paths start.
        show: Receives a line about each step that may take long.

    Raises:
        ConfigError: If nothing can be proposed.
        DataError: If a table can't be read.

    Reveals:
        To readers of the text: columns' names, kinds and declared bounds; with bounds from data,
        rounded ranges and the frequent words of the secondaries' records, and how many rows a
        record serves, too.
    """
    if not secondaries and not lists:
        raise ConfigError("--secondary: at least one table, or one column list by --columns")
    tables = [
        proposed_columns.with_declared(proposed_columns.read_column_list(path), declared)
        if path.suffix == ".json"
        else look_at(path, declared=declared, root=root, show=show)
        for path in (primary, *secondaries, *lists)
    ]
    require_own_tables(
        (table.name, root / table.data, table.reading)
        for table, path in zip(tables, (primary, *secondaries), strict=False)
        if path.suffix != ".json"
    )
    proposed_columns.require_columns(tables, declared)
    proposal = propose(_with_names_that_differ(tables), wishes)
    proposal = _with_links(_with_doubts(proposal), root, show)
    text = federation_text(proposal)
    _parse(text)
    return proposal, text


def _with_doubts(proposal: Proposal) -> Proposal:
    """Return a proposal with the doubts about the tables on this machine, and a split by keys.

    Raises:
        DataError: If a doubt stops.
    """
    texts: list[str] = []
    for table in proposal.tables:
        primary = table is proposal.tables[0]
        in_use = table_in_use(
            table,
            key=proposal.keys.columns[table.name],
            label=proposal.wishes.label if primary else None,
            task=proposal.task if primary else None,
        )
        if in_use is None:
            continue
        if primary and (column := in_use.group_column()) is not None:
            proposal = replace(proposal, split_column=column)
            in_use = replace(in_use, random_split=False)
        texts += [f"{table.name}: {text}" for text in warnings_of(in_use, table.name)]
    return replace(proposal, doubts=tuple(texts))


def warnings_of(table: TableInUse, name: str) -> tuple[str, ...]:
    """Return the doubts about a table that do not stop.

    Raises:
        DataError: If one does.
    """
    stopping, warning = ask(table, where=f"table of {name!r}")
    if stopping:
        raise DataError(stopping[0])
    return warning


def _with_links(proposal: Proposal, root: Path, show: Callable[[str], None]) -> Proposal:
    """Return a proposal with figures of links between the tables on this machine."""
    config = _parse(federation_text(proposal))
    keys = _keys(proposal, config, root)
    better, doubts = _better_spelling(proposal, link_spec(config).keys, keys)
    doubts = [*proposal.keys.doubts, *proposal.doubts, *doubts]
    if better:
        settings = {name: value for found in better for name, value in found.settings.items()}
        shares = tuple(f"keys are spelled differently: {found.in_words()}" for found in better)
        proposal = replace(proposal, spelling=settings, spelling_shares=shares)
        config = _parse(federation_text(proposal))
    spec = link_spec(config)
    normal = {
        name: replace(table_keys, columns=spec.keys.normal(table_keys.columns))
        for name, table_keys in keys.items()
    }
    first, *others = (normal.get(table.name) for table in proposal.tables)
    there = [other for other in others if other]
    if first is None:
        return replace(proposal, doubts=tuple(doubts))
    if there and all(check.one_is_right(spec, first, own) is not None for own in there):
        proposal = replace(proposal, keys=replace(proposal.keys, neighbours=1))
        config = _parse(federation_text(proposal))
    links = {}
    for own in there:
        with contextlib.suppress(SecureVflError):  # check names it
            links[own.name] = check.expected_links(config, first, own, show)
            doubts += links[own.name].warnings(config)
    return replace(proposal, links=links, doubts=tuple(doubts))


def _better_spelling(
    proposal: Proposal, spec: KeySpec, keys: Mapping[str, KeyTable]
) -> tuple[list[spelling.BetterSpelling], list[str]]:
    """Return better spellings for each secondary, by keys or by forms, and doubts about forms."""
    found, doubts = [], []
    first, *others = proposal.tables
    forms = {
        table.name: [
            None if (column := table.column(name)) is None else column.form
            for name in proposal.keys.columns[table.name]
        ]
        for table in proposal.tables
    }
    for own in others:
        if first.name in keys and own.name in keys:
            better = spelling.better_spelling(spec, keys[first.name], keys[own.name])
        else:
            better = spelling.better_by_forms(spec, forms[first.name], forms[own.name])
            doubts += spelling.doubts_about_forms(
                spec, better, {first.name: forms[first.name], own.name: forms[own.name]}
            )
        if better is not None:
            found.append(better)
    return found, doubts


def _keys(proposal: Proposal, config: FederationConfig, root: Path) -> dict[str, KeyTable]:
    """Return the keys of tables on this machine, without those that can't be read."""
    keys = {}
    for table in proposal.tables:
        if table.rows is None:
            continue
        with contextlib.suppress(SecureVflError):
            keys[table.name] = read_keys(
                key_spec(config),
                root / table.data,
                name=table.name,
                columns=proposal.keys.columns[table.name],
                truth=None,
                reading=table.reading,
            )
    return keys


def _parse(text: str) -> FederationConfig:
    return parse_federation(tomllib.loads(text), file="the proposed file")


def _with_names_that_differ(
    tables: Sequence[proposed_columns.Table],
) -> list[proposed_columns.Table]:
    named: dict[str, proposed_columns.Table] = {}
    for table in tables:
        name, number = table.name, 2
        while name in named:
            name, number = f"{table.name}-{number}", number + 1
        named[name] = replace(table, name=name)
    return list(named.values())


def party_name(path: Path) -> str:
    """Return a party's name from its table's file name, up to the first dot."""
    stem = path.name.split(".")[0]
    letters = (letter if letter in checks.NAME_LETTERS else "-" for letter in stem)
    return "".join(letters)[: checks.LONGEST_NAME] or "party"


def _from(root: Path, path: Path) -> str:
    """Return a path for the file: relative if the table lies below the file's folder."""
    resolved, start = path.resolve(), root.resolve()
    return str(resolved.relative_to(start)) if resolved.is_relative_to(start) else str(resolved)


def declared_by_options(
    bounds: Sequence[str] | None,
    words: Sequence[str] | None,
    missing: Sequence[str] | None,
    exclude: Sequence[str] | None,
    reading: Sequence[str] | None,
    *,
    tables: Sequence[Path],
) -> proposed_columns.Declared:
    """Return the declarations of a command line; None is an option that is not given.

    Args:
        bounds: ``COLUMN=LOW,HIGH``.
        words: ``COLUMN=A,B,...``.
        missing: Columns whose cells may be empty.
        exclude: Columns that are no features.
        reading: ``NAME=VALUE`` for all tables, ``PARTY.NAME=VALUE`` for one.
        tables: The tables on this machine.

    Raises:
        ConfigError: If an option has another form, or names an unknown party or setting.
    """
    pairs = {}
    for column, bounds_text in (
        _split_option(text, "--bounds", "COLUMN=LOW,HIGH") for text in bounds or ()
    ):
        try:
            pairs[column] = proposed_columns.checked_bounds(bounds_text.split(","))
        except ConfigError as error:
            raise ConfigError(f"--bounds {column}: {error}") from None
    lists = dict(_split_option(text, "--words", "COLUMN=A,B,...") for text in words or ())
    return proposed_columns.Declared(
        bounds=pairs,
        words={column: tuple(text.split(",")) for column, text in lists.items()},
        missing=missing or (),
        excluded=exclude or (),
        readings=_readings(reading or (), tables),
    )


def _readings(texts: Sequence[str], tables: Sequence[Path]) -> dict[str, Reading]:
    """Return the reading settings of files by party; ``""`` stands for all other parties."""
    parties = list(dict.fromkeys(map(party_name, tables)))
    readings: dict[str, dict[str, object]] = {"": {}}
    for text in texts:
        setting, sign, value = text.partition("=")
        party, dot, name = setting.rpartition(".")
        if not sign or not name or not value:
            raise ConfigError(
                f"--reading: must be NAME=VALUE such as encoding=windows-1252, or "
                f"PARTY.NAME=VALUE; got {text!r}"
            )
        if dot and party not in parties:
            near = checks.did_you_mean(party, parties) or f"; there are {', '.join(parties)}"
            raise ConfigError(f"--reading {setting}: no party is called so{near}")
        readings.setdefault(party, {})[name] = _reading_value(name, value)
    return {
        party: read_settings(Reading, {**readings[""], **own}, where=f"--reading {party}".rstrip())
        for party, own in readings.items()
    }


def _reading_value(name: str, value: str) -> object:
    if name in ("header", "empty"):
        return value.split(",")
    return int(value) if name == "skip_lines" and value.isdecimal() else value


def _split_option(text: str, option: str, form: str) -> tuple[str, str]:
    column, sign, value = text.rpartition("=")
    if not sign or not column or not value:
        raise ConfigError(f"{option}: must be {form}, got {text!r}")
    return column, value
