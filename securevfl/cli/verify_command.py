"""``securevfl verify RUN``: a line a check, and a verdict."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from securevfl.core.errors import PrivacyError
from securevfl.runtime.verify import Finding, verify_run

_WORDS = {True: "good", False: "BAD", None: "-"}


def run_verify(run: Path, *, as_json: bool) -> None:
    """Check a run folder and print what was found.

    Raises:
        ConfigError: If there is nothing to check.
    """
    findings = verify_run(run)
    bad = [one for one in findings if one.good is False]
    if as_json:
        checks = [asdict(one) for one in findings]
        print(json.dumps({"run": str(run), "good": not bad, "checks": checks}))
    else:
        _print(findings)
    if bad:
        sys.exit(PrivacyError.exit_code)


def _print(findings: list[Finding]) -> None:
    width = max(len(one.party) for one in findings)
    for one in findings:
        print(f"{one.check:<12} {one.party:<{width}}  {_WORDS[one.good]:<4}  {one.text}")
    bad = sorted({one.party for one in findings if one.good is False})
    if bad:
        print(f"verdict: BAD ({', '.join(bad)}): what was spent cannot be relied on")
    else:
        print("verdict: good; for what this cannot show: securevfl verify --help")
