"""What the command ``check`` does."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from securevfl.cli.saying import say
from securevfl.core.errors import ConfigError
from securevfl.setup.check import Check, PartyCheck, check_federation


def run_check(path: Path, *, name: str | None, data_root: Path | None, as_json: bool) -> None:
    """Print what a federation file will do and what is wrong with it; then exit code 2."""
    found = check_federation(path, name=name, data_root=data_root)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        _print(Console(), found)
    if not found.fine:
        count = len(found.problems)
        raise ConfigError(f"{path}: {count} problem{'' if count == 1 else 's'}")


def _print(console: Console, found: Check) -> None:
    for one in found.parties:
        _print_party(console, one)
    for name, links in found.links.items():
        say(console, f"links of {name}: ", links.in_words())
    if found.config is not None:
        if found.config.chosen:
            told = (f"{name} = {value!r}" for name, value in found.config.chosen.items())
            say(console, "auto: ", ", ".join(told))
        say(console, "base: ", found.config.base.in_words())
    _print_privacy(console, found)
    _print_costs(console, found)
    if found.config is not None:
        table = Table(title="what each party will learn", title_justify="left")
        for heading in ("channel", "who learns what", "what covers it", "of whom"):
            table.add_column(heading)
        for row in found.learns():
            table.add_row(*(Text(cell) for cell in row.values()))
        console.print(table)
    else:
        say(console, "", "noise, links and costs are told once the settings can be read")
    for warning in found.warnings:
        say(console, "warning: ", warning, style="yellow")
    for problem in found.problems:
        say(console, "wrong: ", " ".join(problem.split()), style="red")
    if found.fine:
        say(console, "nothing is wrong; next: ", f"securevfl simulate {found.file}")


def _print_party(console: Console, one: PartyCheck) -> None:
    party = one.party
    rows = "no table here" if one.rows is None else f"{one.rows:,} rows"
    table = Table(title=Text(f"{party.name}: {party.role}, {rows}"), title_justify="left")
    table.add_column("columns")
    table.add_column("what becomes of them")
    table.add_row("key", Text(", ".join(party.key)))
    if one.features:
        alike: dict[str, list[str]] = {}
        for name, encoding in one.features.items():
            alike.setdefault(encoding, []).append(name)
        texts = [f"{', '.join(names)}: {encoding}" for encoding, names in alike.items()]
        count = "" if one.num_features is None else f" ({one.num_features})"
        table.add_row(f"features{count}", Text("\n".join(texts)))
        table.add_row("scaling", party.scaling)
    if one.unusable:
        table.add_row("wrong as they are", Text(", ".join(one.unusable)))
    dropped = [f"{name} ({why})" for name, why in one.dropped.items() if why != "a key"]
    if dropped:
        table.add_row("no features", Text(", ".join(dropped)))
    console.print(table)


def _print_privacy(console: Console, found: Check) -> None:
    privacy = found.privacy()
    if privacy is None:
        return
    if privacy["mechanism"] != "none":
        say(
            console,
            "noise: ",
            f"each secondary adds noise of deviation {privacy['noise_share_std']:.4g} to every "
            f"number that it releases; one {privacy['unit']} changes {privacy['of']} by at most "
            f"{privacy['sensitivity']:.4g}; epsilon = {privacy['epsilon']:.4g}, "
            f"delta = {privacy['delta']:g}",
        )
    say(console, "promise: ", privacy["statement"])
    if privacy["labels"] is not None:
        say(console, "labels: ", privacy["labels"])


def _print_costs(console: Console, found: Check) -> None:
    if found.costs is None:
        return
    costs = found.costs
    minutes = costs.seconds / 60
    took = f"{minutes:.0f} min" if minutes >= 2 else f"{costs.seconds:.0f} s"
    used = costs.memory_bytes
    memory = "" if used is None else f"; about {used / 1e6:,.0f} MB of memory"
    say(
        console,
        "costs: ",
        f"about {costs.bytes_received / 1e6:,.2f} MB to the primary and "
        f"{costs.bytes_sent / 1e6:,.2f} MB from it (protected linkage not counted); simulated on "
        f"this machine, with nothing beside it, about {took} of training{memory}",
    )
