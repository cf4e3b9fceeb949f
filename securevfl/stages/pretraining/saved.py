"""What a party keeps of pretraining: its encoders, and the figures of the run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.core.files import read_json, write_json
from securevfl.federation.checkpoint import DamagedError, read_state, write_state
from securevfl.stages.pretraining.learning import LearnerWithRecords
from securevfl.stages.pretraining.parties import PretrainingRun
from securevfl.stages.pretraining.policy import nothing_to_pretrain

_ENCODERS_NAME: Final = "encoders.pt"


def load_encoders(run_folder: Path, party: str) -> dict[str, dict[str, Tensor]]:
    """Read a party's encoders from the run folder of an earlier pretraining.

    Raises:
        ConfigError: If there are none, or the file is damaged.
    """
    path = run_folder / "parties" / party / _ENCODERS_NAME
    try:
        return read_state(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"pretraining.checkpoint: {path}: {error.strerror}; name the run folder of a finished "
            f"securevfl train --pretrain-only"
        ) from None
    except DamagedError as error:
        raise ConfigError(
            f"pretraining.checkpoint: {error}; restore it from a copy, or pretrain again"
        ) from None


_NAME: Final = "pretraining.json"


def load_checkpoint(
    config: FederationConfig, party: str, model: nn.Module, *, data_root: Path
) -> None:
    """Start a party's model from the encoders of an earlier pretraining, if the file names one.

    Args:
        config: The federation file.
        party: The party.
        model: Its own.
        data_root: Where the run folder of that pretraining is found.

    Raises:
        ConfigError: If they are not there, or belong to another model.
    """
    folder = config.pretraining.checkpoint
    if config.family.pretraining and folder is not None:
        config.family.load_pretrained(model, load_encoders(data_root / folder, party))


def earlier_figures(run_folder: Path) -> dict[str, Any] | None:
    """Return the figures of a pretraining that has ended in this folder, or None."""
    path = run_folder / _NAME
    if not path.exists():
        return None
    content = read_json(path)
    return {
        key: value for key, value in content.items() if key not in ("history", "bytes", "alignment")
    }


def conclude_figures(
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
    content = read_json(path)
    content.setdefault("bytes", {name: dict(row) for name, row in traffic.items()})
    if alignment is not None:
        content.setdefault("alignment", dict(alignment))
    write_json(path, content)
    return {key: value for key, value in content.items() if key != "history"}


def finish_pretraining(
    config: FederationConfig, model: nn.Module, learning: LearnerWithRecords, party_folder: Path
) -> None:
    """Save a party's encoders in its folder, and let its bottom or top model start from them.

    Raises:
        ConfigError: Naming the party, if the encoders do not fit.
    """
    encoders = learning.learner.encoders()
    write_state(party_folder / _ENCODERS_NAME, encoders)
    try:
        config.family.load_pretrained(model, encoders)
    except ConfigError as error:
        raise ConfigError(f"{learning.name}: {error}") from None


def write_figures(
    run: PretrainingRun, config: FederationConfig, run_folder: Path, *, start: int, labelled: int
) -> dict[str, Any]:
    """Write ``pretraining.json`` to the run folder, and return its figures."""
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
        "labelled_rows": labelled,
        **run.history[-1],
        "seconds": round(sum(line["seconds"] for line in run.history), 3),
    }
    figures.pop("iteration")
    write_json(run_folder / _NAME, {**figures, "history": run.history})
    return figures
