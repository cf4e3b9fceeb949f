"""Say which places of the code that name a device move a tensor in the tests for a GPU.

    python tools/device_moves.py

A place is a call of ``.to(...)`` with a device, of ``.cpu()``, or of a function that makes a
tensor on a device. Where ``tests/unit/gpu`` takes it with a tensor that is elsewhere, it is one
that these tests need. The others are listed: nothing is known of them but what the tests without a
GPU say, or they change nothing wherever the tests come by.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
CODE: Final = ROOT / "securevfl"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402
from helpers import labelled_cuda as labels  # noqa: E402


class Moves:
    """A plugin of pytest: notes from where tensors were moved, or made on the device."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()

    def note(self) -> None:
        """Note the innermost line of the package that is being computed."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(str(CODE)):
            frame = frame.f_back
        if frame is not None:
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))

    def pytest_configure(self) -> None:
        """Look over the shoulder of what stands in for a GPU."""
        moved, factory = labels._moved, labels._factory

        def watched_move(tensor: Any, device: Any, **more: Any) -> Any:
            if labels.device_of(tensor) != device:
                self.note()
            return moved(tensor, device, **more)

        def watched_factory(original: Callable[..., Any], name: str) -> Callable[..., Any]:
            make = factory(original, name)

            def watched_make(*args: Any, device: Any = None, **more: Any) -> Any:
                if device is not None and labels._place(device) == labels.CUDA:
                    self.note()
                return make(*args, device=device, **more)

            return watched_make

        labels._moved, labels._factory = watched_move, watched_factory


def _names_a_device(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    match call.func.attr:
        case "cpu":
            return not given
        case "to":
            return any("device" in ast.unparse(value) for value in given)
        case "Generator":
            return False  # moves nothing; one of another device than its tensor's is refused
        case name:
            makes = name.startswith("new_") or ast.unparse(call.func.value) == "torch"
            return makes and any(keyword.arg == "device" for keyword in call.keywords)


def places() -> Iterator[tuple[Path, ast.Call]]:
    """Yield every call of the package that names a device."""
    for path in sorted(CODE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _names_a_device(node):
                yield path, node


def main() -> int:
    """Run the tests and print the places; return an exit code."""
    moves = Moves()
    code = pytest.main(["-q", "--no-header", str(ROOT / "tests/unit/gpu")], plugins=[moves])
    if code:
        return int(code)
    number, still = 0, []
    for path, call in places():
        number += 1
        lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
        if not any((str(path), line) in moves.lines for line in lines):
            still.append(f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}")
    sys.stdout.write(f"{number - len(still)} of {number} places move a tensor; not these:\n")
    sys.stdout.write("".join(f"  {line}\n" for line in still))
    return 0


if __name__ == "__main__":
    sys.exit(main())
