"""Build the sdist and the wheel, install the wheel in an empty environment, and run README's lines.

``make wheel-check``. Everything happens outside of the tree, so that nothing of it is imported by
accident. The package index is asked for what the wheel needs.

Run:
    python tools/check_wheel.py --out dist
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PATIENCE_S: Final = 1200
EXTRAS: Final = "report,psi"


def main() -> None:
    """Build, look into both files, install one, and run what a newcomer is shown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of both files")
    parser.add_argument("--build-only", action="store_true", help="install and run nothing")
    parser.add_argument(
        "--readme-only", action="store_true", help="run README's lines with this interpreter"
    )
    options = parser.parse_args()
    if options.readme_only:
        with tempfile.TemporaryDirectory(prefix="securevfl-readme-") as place:
            live(Path(sys.executable), Path(place) / "elsewhere")
        return
    with tempfile.TemporaryDirectory(prefix="securevfl-wheel-") as place:
        sdist, wheel = built(Path(place), options.out.resolve())
        require_whole(sdist, wheel)
        sys.stdout.write(
            f"built {wheel.name} ({wheel.stat().st_size / 2**20:.2f} MiB) and {sdist.name}\n"
        )
        if not options.build_only:
            python = installed(Path(place), wheel)
            live(python, Path(place) / "elsewhere")
            sys.stdout.write("README's commands and Python lines ran in an empty environment\n")


def built(place: Path, out: Path) -> tuple[Path, Path]:
    """Return the sdist of a clean copy of the tree, and the wheel made from that sdist."""
    source = place / "source"
    named = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, named.stdout.split("\0")):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    shutil.rmtree(out, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", out, source], ROOT)
    run([sys.executable, "-m", "twine", "check", "--strict", *out.iterdir()], ROOT)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def require_whole(sdist: Path, wheel: Path) -> None:
    """Refuse files that lack a part of the package, or hold more than the package."""
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "securevfl").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for file, names in ((wheel, inside), (sdist, packed)):
        if missing := sorted(ours - names):
            sys.exit(f"{file.name} lacks {', '.join(missing[:5])}")
    if foreign := {name.partition("/")[0] for name in inside if ".dist-info" not in name} - {
        "securevfl"
    }:
        sys.exit(f"{wheel.name} also holds {', '.join(sorted(foreign))}")


def installed(place: Path, wheel: Path) -> Path:
    """Return the interpreter of a new environment that has the wheel and what it asks for."""
    run([sys.executable, "-m", "venv", place / "env"], place)
    python = place / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--constraint", ROOT / "constraints.txt", f"{wheel}[{EXTRAS}]"], place)
    run([python, "-m", "pip", "check"], place)
    return python


def live(python: Path, folder: Path) -> None:
    """Run the commands and the Python lines of the README on the tables of ``docs/orders.md``."""
    folder.mkdir()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    orders = (ROOT / "docs" / "orders.md").read_text(encoding="utf-8")
    for page in (orders, readme):
        (lines,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
        run([python, "-c", lines], folder)
        if page is orders:
            for command in re.findall(
                r"^securevfl (.*)$", readme.replace("\\\n", ""), re.MULTILINE
            ):
                run([python, "-m", "securevfl", *command.split()], folder)
    for name in ("predictions.csv", "runs/first/report.html"):
        if not (folder / name).is_file():
            sys.exit(f"README's commands wrote no {name}")


def run(command: Sequence[object], folder: Path) -> None:
    """Run a command in a folder; its error ends this program."""
    words = [str(word) for word in command]
    ended = subprocess.run(words, cwd=folder, timeout=PATIENCE_S, capture_output=True, text=True)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(words)[:300]}: {ended.stdout[-3000:]}{ended.stderr[-3000:]}")


if __name__ == "__main__":
    main()
