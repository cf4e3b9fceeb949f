"""The page of the saved model: its lines of Python, on a run of another family."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from securevfl.testing import run_in_process, write_federation

PAGE = (Path(__file__).parents[2] / "docs/model.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", ["fet", "top1sim"])
def test_a_secondarys_half_is_a_module_that_torch_exports(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file computes for other numbers of rows what the saved half computes."""
    path = write_federation(
        tmp_path, rows=60, secondaries=1, training={"epochs": 1}, model={"family": family}
    )
    run_in_process(path, tmp_path / "runs/first", data_root=tmp_path)
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(script.replace("customers", "bank-1"), "docs/model.md", "exec"), names)

    program = torch.export.load("bank-1.pt2").module()
    some = [names[name][:5] for name in ("links", "keys", "present")]
    some[2] = some[2].clone()
    some[2][0] = False
    with torch.no_grad():
        wanted, computed = names["bottom"](*some), program(*some)
    assert wanted.std() > 0.01
    assert torch.allclose(wanted, computed, atol=1e-6)
