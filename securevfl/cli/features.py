"""What ``securevfl features`` does: a frozen run's releases out, as a table."""

import json
import sys
from pathlib import Path

from securevfl.core import files
from securevfl.runtime.entry import features
from securevfl.runtime.released_table import COST, METADATA, require_writable_name, write_released


def run_features(
    run: Path,
    *,
    out: Path,
    own: bool,
    federation: Path | None,
    data_root: Path | None,
    as_json: bool,
) -> None:
    """Write the releases of a run, and say what they are and that they cost nothing."""
    require_writable_name(out)
    files.require_writable_folder(out.parent, what="folder of --out")
    frame = features(run, own=own, federation=federation, data_root=data_root)
    told = frame.attrs[METADATA]
    write_released(frame, out)
    numbers = int(told["shape"][0] * told["shape"][1])
    if as_json:
        summary = {"features": str(out), "rows": len(frame), "released": numbers, **told}
        print(json.dumps(summary))
        return
    noise = told["noise_deviation"]
    print(
        f"securevfl: {len(frame)} rows with {numbers} released numbers each, "
        + (f"noise of deviation {noise:.4g} in each" if noise else "no noise in them")
        + f"; this costs {COST}",
        file=sys.stderr,
    )
    print(f"securevfl: {told['statement']}", file=sys.stderr)
    print(out)
