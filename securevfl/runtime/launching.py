"""A whole federation on this machine: one process per party, with identities for this run only."""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import tomli_w

from securevfl.config.federation import FederationConfig
from securevfl.config.parties import parse_address
from securevfl.config.reading import parse_federation
from securevfl.config.rules import require_covered_channels, require_helpers
from securevfl.core import files
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.core.progress import CiphertextsMade, Observer, SpendingPlanned, Warned, event_of
from securevfl.launch.outcome import PartyExit
from securevfl.launch.ports import free_port
from securevfl.launch.process import PartyCommand
from securevfl.launch.spawn import run_party_processes
from securevfl.runtime.figures import RunFigures
from securevfl.runtime.run_folder import write_figures
from securevfl.transport.provision import SHORT_LIVED_DAYS, provision

# Longer than any run on one machine: real deadlines are those of [runtime].
_LAUNCH_DEADLINE_S = 7 * 24 * 3600.0

# Events of any party that the user sees; of others, the primary's alone.
_OF_ALL = (Warned, SpendingPlanned, CiphertextsMade)

OUTCOME_EVENT: Final = "outcome"
"""What a launched primary tells last: the run's figures, or those of pretraining."""


def train_in_processes(
    config: FederationConfig,
    run_folder: Path,
    *,
    data_root: Path,
    resume: bool,
    device: str,
    observe: Observer,
    beside: Callable[[], Mapping[str, Any]] = dict,
) -> RunFigures:
    """Run every party of a federation in its own process on this machine.

    Args:
        config: The federation file; addresses and identities are replaced by this run's own.
        run_folder: Gets the files that docs/architecture.md lists ("A run folder"), but no report.
        data_root: Where relative data paths start.
        resume: Go on from the last epoch that was saved.
        device: Where each party computes.
        observe: Hears the primary's progress, every party's warnings and spending, and the
            ciphertexts that secondaries prepare.
        beside: Returns figures of :class:`RunFigures` that are computed once the run is done.

    Returns:
        The run's figures, as ``metrics.json`` has them.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what a real federation reveals. This machine holds all of it.
    """
    told, exits = _run_parties(
        config, run_folder, data_root, resume=resume, device=device, observe=observe, more=[]
    )
    try:
        figures = RunFigures.from_json(told)
    except (TypeError, KeyError):
        raise SecureVflError("the primary ended without the figures of a run") from None
    memory = {name: end.peak_memory_bytes for name, end in exits.items()}
    figures = replace(figures, peak_memory_bytes=memory, **beside())
    write_figures(run_folder, figures)
    return figures


def pretrain_in_processes(
    config: FederationConfig,
    run_folder: Path,
    *,
    data_root: Path,
    resume: bool,
    device: str,
    observe: Observer,
) -> dict[str, Any]:
    """Pretrain every party's encoders in its own process; see :func:`train_in_processes`.

    Returns:
        What ``pretraining.json`` holds, without its history.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what a real pretraining reveals. This machine holds all of it.
    """
    told, _ = _run_parties(
        config,
        run_folder,
        data_root,
        resume=resume,
        device=device,
        observe=observe,
        more=["--pretrain"],
    )
    return dict(told)


def _run_parties(
    config: FederationConfig,
    run_folder: Path,
    data_root: Path,
    *,
    resume: bool,
    device: str,
    observe: Observer,
    more: Sequence[str],
) -> tuple[Mapping[str, Any], dict[str, PartyExit]]:
    """Run all parties; return what the primary tells in the end, and how each process ended."""
    require_covered_channels(config)
    require_helpers(config)
    files.require_writable_folder(run_folder)
    names = [party.name for party in config.parties]
    primary = config.primary.name
    outcome: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="securevfl-identities-") as identities:
        pinned = provision(names, Path(identities), valid_days=SHORT_LIVED_DAYS)
        # Not in the run folder: what lies there belongs to a run that has begun.
        federation = Path(identities) / "federation.toml"
        pinned_config = _pin(config, pinned)
        files.write_text(federation, tomli_w.dumps(dict(pinned_config.source)))
        # Parties share the cores; more threads than cores fight for them. A number that the user
        # has set stands: with it, a simulation adds float32 numbers in the same order.
        shared = str(max(1, (os.cpu_count() or 1) // len(names)))
        threads = os.environ.get("OMP_NUM_THREADS", shared)
        commands = [
            PartyCommand(
                name=name,
                arguments=[
                    *(sys.executable, "-m", "securevfl.cli.main", "party", str(federation)),
                    *("--name", name, "--identity", str(Path(identities) / name)),
                    *("--out", str(run_folder), "--data-root", str(data_root)),
                    *("--device", device),
                    *(["--resume"] if resume else []),
                    *(more if name == primary else []),
                ],
                log_path=run_folder / "parties" / name / "output.log",
                environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )
            for name in names
        ]

        def on_event(name: str, report: Mapping[str, Any]) -> None:
            figures = {key: value for key, value in report.items() if key != "event"}
            if name == primary and report.get("event") == OUTCOME_EVENT:
                outcome.update(figures)
            event = event_of(str(report.get("event")), figures)
            if event is not None and (name == primary or isinstance(event, _OF_ALL)):
                observe(event)

        exits = run_party_processes(commands, deadline_s=_LAUNCH_DEADLINE_S, on_event=on_event)
    return outcome, exits


def _pin(config: FederationConfig, pinned: Mapping[str, str]) -> FederationConfig:
    source = dict(config.source)
    source["party"] = [
        {**party, "identity": pinned[party["name"]]} for party in config.source["party"]
    ]
    for party in source["party"]:
        if party["role"] == "primary":
            party["address"] = _with_port(*parse_address(party["address"]))
    return parse_federation(source, file="federation.toml of this run")


def _with_port(host: str, port: int) -> str:
    try:
        return f"{host}:{port or free_port(host)}"
    except OSError as error:
        raise ConfigError(
            f"party.address: {host} is no address of this machine ({error.strerror or error}); "
            f'use "127.0.0.1:0" for a run on one machine'
        ) from None
