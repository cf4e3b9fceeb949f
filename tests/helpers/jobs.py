"""What the process of a secondary is told, in a small federation with identities."""

from pathlib import Path

import torch

from securevfl import read_federation
from securevfl.runtime.run_options import PartyJob
from securevfl.testing import write_federation
from securevfl.transport.identity import provision


def secondary_job(folder: Path, **runtime: object) -> PartyJob:
    """Write a federation to a folder and return the job of ``bank-1``; ``runtime`` are settings."""
    path = write_federation(folder, rows=20, runtime=runtime)
    pinned = provision(["agency", "bank-1", "bank-2"], folder / "ids")
    text = path.read_text()
    for name, identity in pinned.items():
        text = text.replace(f'name = "{name}"', f'name = "{name}"\nidentity = "{identity}"')
    path.write_text(text)
    return PartyJob(
        config=read_federation(path),
        name="bank-1",
        run_folder=folder / "run",
        identity_folder=folder / "ids" / "bank-1",
        data_root=folder,
        device=torch.device("cpu"),
        resume=False,
    )
