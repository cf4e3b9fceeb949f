"""Output of ``securevfl check``: a page for a decision, or by ``--long`` all that is known."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from securevfl.config.disclosure import coverage
from securevfl.config.federation import FederationConfig
from securevfl.desk.printing import say
from securevfl.desk.setup.check import Check
from securevfl.desk.setup.party_check import PartyCheck

_KNOWN: Final = ("a key", "the label")
_MOST_NAMED: Final = 6


def print_check(console: Console, checked: Check, name: str | None, *, long: bool) -> None:
    """Print a check.

    Args:
        console: The terminal or file.
        checked: The check.
        name: The one party whose table is here; None: all are.
        long: Whether to print every column, setting, channel and sentence.
    """
    for party_check in checked.parties:
        if long or party_check.unusable:
            _print_party(console, party_check)
        else:
            say(console, f"{party_check.party.name}: ", _party_in_words(party_check))
    for party, links in checked.links.items():
        say(console, f"links of {party}: ", links.in_words())
    if long and checked.config is not None:
        _print_settings(console, checked.config)
    privacy = checked.privacy()
    if privacy is not None:
        _print_privacy(console, privacy, long=long)
    if checked.costs is not None:
        received, sent = checked.costs.bytes_received / 1e6, checked.costs.bytes_sent / 1e6
        text = f"about {received:,.2f} MB to the primary, {sent:,.2f} MB from it"
        say(console, "costs: ", f"{text}; protected linkage not counted" if long else text)
    if checked.config is None:
        say(console, "", "noise, links and costs are shown once the settings can be read")
    else:
        _print_channels(console, checked.learns(), long=long)
    for warning in checked.warnings:
        say(console, "warning: ", warning, style="yellow")
    for problem in checked.problems:
        say(console, "wrong: ", " ".join(problem.split()), style="red")
    if checked.fine:
        following = f"securevfl simulate {checked.file}"
        if name is not None:  # one party's table cannot be simulated
            following = (
                f"securevfl check {checked.file} --name {name} --identity DIR --peers, at an "
                f"agreed time; then securevfl party {checked.file} --name {name} --identity DIR"
            )
        more = "" if long else " (check --long shows every column, setting and channel)"
        say(console, "nothing is wrong; next: ", f"{following}{more}")


def _print_settings(console: Console, config: FederationConfig) -> None:
    if config.chosen:
        settings = (f"{setting} = {value!r}" for setting, value in config.chosen.items())
        say(console, "auto: ", ", ".join(settings))
    say(console, "base: ", config.base.in_words())


def _print_channels(console: Console, learns: Sequence[Mapping[str, str]], *, long: bool) -> None:
    """Print who learns what: every channel with its reach, or their names by coverage."""
    if long:
        say(console, "what each party will learn:", "")
        for row in learns:
            about = f"{row['guarantee']}; about {row['whose']}, to {row['to']}"
            say(console, f"- {row['channel']}: ", f"{row['reveals']} ({about})")
        return
    for mark in ("covered", "partly covered", "not covered"):
        names = [
            f"{row['channel']} ({row['reveals']})"
            if row["channel"] == "linkage"
            else row["channel"]
            for row in learns
            if coverage(row) == mark
        ]
        if names:
            say(console, "learns: ", f"{mark}: {', '.join(names)}")


def _party_in_words(party_check: PartyCheck) -> str:
    """Return a party's rows, features and left out columns in a line."""
    party = party_check.party
    rows = "no table here" if party_check.rows is None else f"{party_check.rows:,} rows"
    words = [f"{party.role}, {rows}"]
    if party_check.num_features is not None:
        words.append(f"{party_check.num_features} features of {_some(party_check.features)}")
    excluded = [name for name, why in party_check.dropped.items() if why not in _KNOWN]
    if excluded:
        words.append(f"left out: {_some(excluded)}")
    return "; ".join(words)


def _some(names: Collection[str]) -> str:
    """Return the first names of many, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(list(names)[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _print_party(console: Console, party_check: PartyCheck) -> None:
    party = party_check.party
    rows = "no table here" if party_check.rows is None else f"{party_check.rows:,} rows"
    title = Text(f"{party.name}: {party.role}, {rows}")
    table = Table("columns", "what becomes of them", title=title, title_justify="left")
    table.add_row("key", Text(", ".join(party.key)))
    if party_check.features:
        alike: dict[str, list[str]] = {}
        for name, encoding in party_check.features.items():
            alike.setdefault(encoding, []).append(name)
        texts = [f"{', '.join(names)}: {encoding}" for encoding, names in alike.items()]
        count = "" if party_check.num_features is None else f" ({party_check.num_features})"
        table.add_row(f"features{count}", Text("\n".join(texts)))
        table.add_row("scaling", party.scaling)
    if party_check.unusable:
        table.add_row("wrong as they are", Text(", ".join(party_check.unusable)))
    dropped = [f"{name} ({why})" for name, why in party_check.dropped.items() if why != "a key"]
    if dropped:
        table.add_row("no features", Text(", ".join(dropped)))
    console.print(table)


def _print_privacy(console: Console, privacy: Mapping[str, Any], *, long: bool) -> None:
    if long and privacy["mechanism"] != "none":
        noise = (
            f"each secondary adds noise of deviation {privacy['noise_share_std']:.4g} to every "
            f"number that it releases; one {privacy['unit']} changes {privacy['of']} by at most "
            f"{privacy['sensitivity'] or 0:.4g}"
        )
        if privacy["cells"] is not None:
            noise = (
                f"each secondary sends one of {privacy['cells']} cells for a row, by randomised "
                f"response; any other cell is {privacy['noise_share_std']:.4g} times as likely as "
                f"the record's own"
            )
        elif privacy["sensitivity"] is None:
            noise = (
                f"each secondary adds its share of one Laplace noise to every number that it "
                f"releases; the whole has {privacy['noise_share_std']:.4g} times a record's "
                f"largest number for its scale"
            )
        say(
            console,
            "noise: ",
            f"{noise}; epsilon = {privacy['epsilon']:.4g}, delta = {privacy['delta']:g}",
        )
    say(console, "promise: ", privacy["statement"])
    if privacy["labels"] is not None:
        labels = privacy["labels"]
        say(console, "labels: ", labels if long else labels.partition(" Not covered: ")[0])
    if privacy["predictions"] is not None:
        predictions = privacy["predictions"]
        say(console, "predictions: ", predictions if long else predictions.partition(". ")[0])
