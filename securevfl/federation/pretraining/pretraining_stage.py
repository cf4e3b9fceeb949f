"""Pretraining as a stage of a run: where it starts, what it saves, what fine-tuning starts from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.data.rows import RowSplit
from securevfl.federation.pretraining.pretraining_run import PretrainingRun
from securevfl.federation.state_files import DamagedError, read_state, write_state

# The file in which a party keeps its pretrained encoders.

_ENCODERS_NAME: Final = "encoders.pt"


def save_encoders(party_folder: Path, encoders: dict[str, dict[str, Tensor]]) -> None:
    """Write a party's encoders to its own folder, atomically."""
    write_state(party_folder / _ENCODERS_NAME, encoders)


def load_encoders(run_folder: Path, party: str) -> dict[str, dict[str, Tensor]]:
    """Read a party's encoders from the run folder of an earlier pretraining.

    Raises:
        ConfigError: If there are none, or the file is damaged.
    """
    path = run_folder.expanduser() / "parties" / party / _ENCODERS_NAME
    try:
        return read_state(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"pretraining.checkpoint: {path}: {error.strerror}; name the run folder of a finished "
            f"securevfl pretrain"
        ) from None
    except DamagedError as error:
        raise ConfigError(
            f"pretraining.checkpoint: {error}; restore it from a copy, or pretrain again"
        ) from None


# Pretraining as a stage of a run: where it starts, what it keeps, what fine-tuning starts from.

_NAME: Final = "pretraining.json"


def wants_pretraining(config: FederationConfig) -> bool:
    """Whether a run begins with pretraining of its own."""
    return bool(config.family.pretraining) and config.pretraining.checkpoint is None


def load_checkpoint(config: FederationConfig, party: str, model: nn.Module) -> None:
    """Start a party's model from the encoders of an earlier pretraining, if the file names one.

    Raises:
        ConfigError: If they are not there, or belong to another model.
    """
    folder = config.pretraining.checkpoint
    if config.family.pretraining and folder is not None:
        config.family.load_pretrained(model, load_encoders(Path(folder), party))


def run_pretraining(
    run: PretrainingRun, config: FederationConfig, run_folder: Path, *, start: int, split: RowSplit
) -> dict[str, Any]:
    """Run the primary's part, and write ``pretraining.json`` to the run folder.

    Returns:
        For ``metrics.json``: algorithm, iterations, seconds and the last iteration's figures.

    Reveals:
        What :class:`securevfl.federation.pretraining.pretraining_exchange.PretrainingExchange`
        says.
    """
    try:
        run.run(start=start)
    finally:
        run.sending.close()
    settings = config.pretraining
    earlier = earlier_figures(run_folder)
    if start >= settings.iterations and earlier is not None:
        # It had ended, and nothing was learned now: its file keeps what was sent, too.
        return earlier
    figures: dict[str, Any] = {
        "method": config.family.name,
        "algorithm": settings.algorithm,
        "steps": list(config.family.pretraining),
        "iterations": settings.iterations,
        **({"aligned_rows": len(run.rows.aligned)} if "cross" in run.steps else {}),
        "own_rows": len(run.rows.own),
        "labelled_rows": len(split.train),
        **run.history[-1],
        "seconds": round(sum(line["seconds"] for line in run.history), 3),
    }
    figures.pop("iteration")
    files.write_json(run_folder / _NAME, {**figures, "history": run.history})
    return figures


def earlier_figures(run_folder: Path) -> dict[str, Any] | None:
    """Return the figures of a pretraining that has ended in this folder, or None."""
    path = run_folder / _NAME
    if not path.exists():
        return None
    content = files.read_json(path)
    return {
        key: value for key, value in content.items() if key not in ("history", "bytes", "alignment")
    }


def write_pretraining(
    run_folder: Path,
    figures: Mapping[str, Any] | None,
    traffic: Mapping[str, Mapping[str, int]],
    *,
    alignment: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Add what was sent to ``pretraining.json``, unless it says so already; return its figures.

    Args:
        run_folder: Where it lies.
        figures: What pretraining came to.
        traffic: What each party sent and received.
        alignment: How many rows are linked where; None where nobody asked.

    Raises:
        ConfigError: If the federation file has nothing to pretrain.
    """
    if figures is None:
        raise nothing_to_pretrain()
    path = run_folder / _NAME
    content = files.read_json(path)
    content.setdefault("bytes", {name: dict(row) for name, row in traffic.items()})
    if alignment is not None:
        content.setdefault("alignment", dict(alignment))
    files.write_json(path, content)
    return {key: value for key, value in content.items() if key != "history"}


def nothing_to_pretrain() -> ConfigError:
    """Return the refusal of a pretraining that has no steps."""
    return ConfigError(
        "model.family: there is nothing to pretrain: choose a family that pretrains, such as "
        '"fedhssl", and no pretraining.checkpoint'
    )


def common_start(config: FederationConfig, saved: Sequence[Sequence[int]]) -> int:
    """Return after how many iterations all parties can go on, 0 for a fresh start."""
    if not wants_pretraining(config):
        return 0
    return max(set.intersection(*(set(one) for one in saved)), default=0)


def hand_over(
    config: FederationConfig,
    model: nn.Module,
    encoders: Mapping[str, Mapping[str, Tensor]],
    *,
    party: str,
) -> None:
    """Let a bottom or top model start from what was pretrained.

    Raises:
        ConfigError: Naming the party, if the encoders do not fit.
    """
    try:
        config.family.load_pretrained(model, encoders)
    except ConfigError as error:
        raise ConfigError(f"{party}: {error}") from None
