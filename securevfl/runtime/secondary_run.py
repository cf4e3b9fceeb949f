"""A secondary's part in a run, in one process or in its own: how it begins, what it keeps."""

from functools import partial

import torch

from securevfl.data.tables import PartyTable
from securevfl.federation.build import build_secondary, save_secondary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.handshake import own_epoch
from securevfl.federation.session.party_files import PartyFiles
from securevfl.linkage.spec import LinkedSecondary
from securevfl.runtime.run_folder import write_explanation


def begin_secondary(
    plan: RunPlan,
    name: str,
    table: PartyTable,
    linked: LinkedSecondary,
    files: PartyFiles,
    *,
    device: torch.device,
) -> Secondary:
    """Build a secondary's half of the network, from its checkpoint where the run is resumed.

    Args:
        plan: The run, with where it starts.
        name: The party's name.
        table: Its table.
        linked: Its links.
        files: Its own; its ledger is open.
        device: Where it computes.

    Raises:
        SecureVflError: What :func:`securevfl.federation.build.build_secondary` raises.
    """
    checkpoints = files.checkpoints
    secondary = build_secondary(
        plan,
        plan.config.party(name),
        table,
        linked,
        files.ledger,
        files=checkpoints.files,
        device=device,
    )
    epoch = plan.facts.resume_epoch
    own = 0 if plan.frozen else own_epoch(checkpoints.epochs(), plan.facts)
    if own:
        # With the encoder of its last epoch, however far the others have gone since.
        checkpoints.load(own, partial(secondary.resume, epoch))
    elif files.resume:
        checkpoints.forget_after(0)
        if not plan.frozen:
            secondary.validator.start_after(epoch)
    return secondary


def keep_secondary(
    plan: RunPlan,
    table: PartyTable,
    linked: LinkedSecondary,
    secondary: Secondary,
    files: PartyFiles,
) -> None:
    """Save a secondary's part of the model, and what it makes of links, in its own folder.

    Args:
        plan: The run.
        table: Its table.
        linked: Its links.
        secondary: At the best epoch.
        files: Its own.

    Raises:
        StorageError: If the disk takes no more.
    """
    save_secondary(plan, table, linked, secondary, files.ledger, folder=files.folder)
    write_explanation(files.folder, secondary.explanation())
