"""``securevfl identity``: make a party's identity, and trust that of another party."""

import json
from pathlib import Path
from typing import Annotated

import typer

from securevfl.core.command_line import AsJson, FederationFile

app = typer.Typer(
    no_args_is_help=True,
    help="Create identities and certificates, and trust those of other parties.",
)


@app.command()
def create(
    federation: FederationFile,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the identities.")],
    name: Annotated[
        str | None,
        typer.Option("--name", help="Make this party's identity only; each party runs it at home."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 365,
    as_json: AsJson = False,
) -> None:
    """Create identities and certificates, and print their lines for the federation file."""
    from securevfl.config.reading import read_federation
    from securevfl.config.sections import parse_address
    from securevfl.core import checks, files
    from securevfl.transport.identity import provision, provision_one

    config = read_federation(federation)
    checks.at_least(1, days=days)
    files.require_writable_folder(out, what="folder")
    assert config.primary.address is not None
    host = parse_address(config.primary.address)[0]
    hosts = {config.primary.name: [host]}
    if name is not None:
        party = config.party(name)
        pinned = {
            name: provision_one(party.name, out, valid_days=days, hosts=hosts.get(party.name, []))
        }
    else:
        pinned = provision(
            [party.name for party in config.parties], out, valid_days=days, hosts=hosts
        )
    if as_json:
        print(json.dumps({"identities": pinned}))
        return
    for party_name, text in pinned.items():
        print(f'# [[party]] name = "{party_name}"\nidentity = "{text}"')
    if name is not None:
        print(
            f"\n# Send {out / name / 'identity.pem'} to the other parties, and trust theirs with "
            f"securevfl identity trust."
        )
    else:
        print(f"\n# Give each party its own folder of {out}, and no other one.")


@app.command()
def trust(
    certificate: Annotated[
        Path, typer.Argument(metavar="CERTIFICATE", help="The identity.pem that a party sent.")
    ],
    name: Annotated[str, typer.Option("--name", help="Which party sent it.")],
    identity: Annotated[
        Path,
        typer.Option("--identity", help="Your own folder, made by securevfl identity create."),
    ],
    as_json: AsJson = False,
) -> None:
    """Trust another party's certificate, and print its identity for comparison."""
    from securevfl.transport.identity import trust

    text = trust(identity, name, certificate)
    if as_json:
        print(json.dumps({"identities": {name: text}}))
        return
    print(f'# [[party]] name = "{name}"\nidentity = "{text}"')
    print("\n# Compare this line with what the party itself reads out, by telephone for example.")
