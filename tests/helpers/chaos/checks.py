"""What must hold of a run folder, whoever was killed on the way to it."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from securevfl import SecureVflError
from securevfl.desk.report.verify import verify_run
from securevfl.ledger.ledger_file import summary_of

_FIGURES: Final = ("train", "validation", "test", "test_metrics", "epochs", "best_epoch")


def differences(run: Path, whole: Path) -> Iterator[str]:
    """Yield what of a run's model, predictions and metrics is not the undisturbed run's."""
    files = sorted(whole.glob("parties/*/model/weights.safetensors"))
    for path in [*files, whole / "predictions.csv"]:
        name = path.relative_to(whole)
        if not (run / name).exists():
            yield f"{name}: is not there"
        elif (run / name).read_bytes() != path.read_bytes():
            yield f"{name}: differs from the undisturbed run's"
    found, expected = (json.loads((one / "metrics.json").read_text()) for one in (run, whole))
    for figure in _FIGURES:
        if found[figure] != expected[figure]:
            yield f"metrics.json: {figure} is {found[figure]}, undisturbed {expected[figure]}"


def uncharged(
    notes: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]], *, once: bool
) -> Iterator[str]:
    """Yield the rounds of which more has left a party than its ledger says.

    Args:
        notes: What the party's processes put on the wire, by :mod:`helpers.chaos.witness`.
        entries: The lines of its ledger.
        once: Whether a round's answer is kept, and sent again with the same noise, so that one
            charge covers all of its sendings.
    """
    released = ("SHARE", "GRADIENT")
    left = {(one["session"], one["round"]) for one in notes if one["what"] in released}
    sent = Counter(number for _, number in left)
    booked = Counter(one["round"] for one in entries if one["kind"] == "charge")
    for number, count in sorted(sent.items()):
        needed = 1 if once else count
        if booked[number] < needed:
            yield f"round {number} left {needed} times and was charged {booked[number]} times"


def ledger_faults(
    run: Path,
    tables: Mapping[str, Path],
    notes: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    once: bool,
    budget: float | None,
) -> Iterator[str]:
    """Yield what is wrong with the ledgers of a run's parties.

    Args:
        run: The run folder.
        tables: The ledgers of their tables, by party.
        notes: As of :func:`uncharged`, by party.
        once: As of :func:`uncharged`.
        budget: The epsilon that the federation file allows; None: none is promised.
    """
    try:
        findings = verify_run(run)
    except SecureVflError as error:
        yield f"verify: {error}"
        findings = []
    yield from (f"verify: {one.party}: {one.text}" for one in findings if one.good is False)
    for party, path in tables.items():
        if not path.exists():
            yield f"{party}: has no ledger"
            continue
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        for fault in uncharged(notes.get(party, ()), entries, once=once):
            yield f"{party}: {fault}"
        try:
            units = summary_of(path).units
        except SecureVflError as error:
            yield f"{party}: {error}"
            continue
        for unit in units:
            if budget is not None and (unit.epsilon is None or not unit.epsilon <= budget):
                yield f"{party}: has spent epsilon {unit.epsilon}, and {budget} is allowed"


def left_behind(folder: Path, whole: Path) -> Iterator[str]:
    """Yield files that an undisturbed run does not leave, and every private key.

    Args:
        folder: All that the cycle wrote: tables, the run folder, temporary files.
        whole: The same of the undisturbed run.
    """
    known = {re.sub(r"\d+", "N", str(path.relative_to(whole))) for path in whole.rglob("*")}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if re.sub(r"\d+", "N", name) not in known and not name.startswith("notes"):
            yield f"{name}: is left behind"
        if path.is_file() and b"PRIVATE KEY" in path.read_bytes():
            yield f"{name}: holds a private key"
