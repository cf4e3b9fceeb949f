"""What the commands ``provision`` and ``trust`` do."""

import json
from pathlib import Path

from securevfl.config.parties import parse_address
from securevfl.config.reading import read_federation
from securevfl.core import checks, files
from securevfl.transport.identity import provision, provision_one, trust


def run_provision(path: Path, *, out: Path, name: str | None, days: int, as_json: bool) -> None:
    """Make identities and print the lines that the federation file pins."""
    config = read_federation(path)
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
            f"\n# Send {out / name / 'identity.pem'} to the other parties, and take theirs in with "
            f"securevfl trust."
        )
    else:
        print(f"\n# Give each party its own folder of {out}, and nobody another one's.")


def run_trust(certificate: Path, *, name: str, identity: Path, as_json: bool) -> None:
    """Take another party's certificate into one's own folder, and print the line to compare."""
    text = trust(identity, name, certificate)
    if as_json:
        print(json.dumps({"identities": {name: text}}))
        return
    print(f'# [[party]] name = "{name}"\nidentity = "{text}"')
    print("\n# Compare this line with what the party itself reads out, by telephone for example.")
