"""Identities: all at one place, or a kit for each party, and the exchange of certificates."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from securevfl.core.command_line import AsJson, FederationFile

app = typer.Typer(
    no_args_is_help=True,
    help="Make identities and certificates, and take in those of other parties.",
)


@app.command()
def create(
    federation: FederationFile,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the identities.")],
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 365,
    as_json: AsJson = False,
) -> None:
    """Create all parties' identities, and print their lines for the federation file."""
    from securevfl.config.reading import read_federation
    from securevfl.config.sections import parse_address
    from securevfl.core import checks, files
    from securevfl.transport.identity import provision

    config = read_federation(federation)
    checks.at_least(1, days=days)
    files.require_writable_folder(out, what="folder")
    hosts = {config.primary.name: [parse_address(config.address)[0]]}
    pinned = provision([party.name for party in config.parties], out, valid_days=days, hosts=hosts)
    if as_json:
        print(json.dumps({"identities": pinned}))
        return
    for party_name, text in pinned.items():
        print(f'# [[party]] name = "{party_name}"\nidentity = "{text}"')
    print(f"\n# Give each party its own folder of {out}, and no other one.")


@app.command()
def provision(
    federation: FederationFile,
    name: Annotated[str, typer.Option("--name", help="Your party.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the kit.")],
    days: Annotated[int, typer.Option(help="How long the certificate is valid.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Make a new key; the old one is kept beside it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a folder for a party's IT: key, certificate, README, compose and systemd files."""
    from securevfl.desk.setup import kit

    text = kit.provision(federation, name, out, days=days, renew=renew)
    if as_json:
        print(json.dumps({"folder": str(out), "identities": {name: text}}))
        return
    if (warning := kit.unreachable_primary(federation)) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{out}: the kit of {name}; its README.md says what to do.")
    print(f"Send {out / kit.IDENTITY / 'identity.pem'} to the other parties.")


@app.command()
def join(
    federation: FederationFile,
    certificates: Annotated[
        list[Path], typer.Argument(metavar="CERTIFICATE...", help="What the other parties sent.")
    ],
    name: Annotated[str, typer.Option("--name", help="Your party.")],
    identity: Annotated[Path, typer.Option("--identity", help="Your own folder with the key.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Accept a new certificate in place of an old one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take in other parties' certificates, and pin all keys in the federation file."""
    from securevfl.desk.setup import kit

    joined = kit.join(federation, name, identity, certificates, replace=replace)
    if as_json:
        print(json.dumps(dataclasses.asdict(joined)))
        return
    print(f"{federation}: pins {', '.join(joined.identities)}")
    if joined.missing:
        print(f"still to come: {', '.join(joined.missing)}")
        return
    print(f"code: {joined.code}")
    print("Compare it with all others by telephone: an altered certificate or file changes it.")
