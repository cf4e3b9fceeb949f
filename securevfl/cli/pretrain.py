"""What the command ``pretrain`` does."""

from pathlib import Path

from securevfl.cli.results import print_pretraining
from securevfl.cli.run import run_folder_for
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.memory import keep_freed_memory
from securevfl.federation.pretraining.pretraining_stage import (
    nothing_to_pretrain,
    wants_pretraining,
)
from securevfl.runtime.launching import pretrain_in_processes
from securevfl.runtime.preflight import device_named
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.shown_progress import RunProgress
from securevfl.runtime.simulation import simulate_federation


def run_pretrain(
    path: Path,
    *,
    out: Path | None,
    simulated: bool,
    resume: bool,
    device: str,
    data_root: Path | None,
    as_json: bool,
) -> None:
    """Pretrain a federation's encoders, and leave each party's in its own folder.

    Raises:
        ConfigError: If the federation file has nothing to pretrain.
    """
    config = read_federation(path)
    if not wants_pretraining(config):
        raise nothing_to_pretrain()
    folder = run_folder_for(config, out, resume=resume)
    root, torch_device = data_root or path.parent, device_named(device)
    with RunProgress(metric="") as progress:
        if simulated:
            keep_freed_memory()
            files.require_writable_folder(folder)
            figures = simulate_federation(
                config,
                read_tables(config, root),
                folder,
                device=torch_device,
                resume=resume,
                observe=progress,
                pretrain_only=True,
            ).metrics
        else:
            figures = pretrain_in_processes(
                config,
                folder,
                data_root=root.resolve(),
                resume=resume,
                device=device,
                observe=progress,
            )
    print_pretraining(figures, folder, as_json=as_json)
