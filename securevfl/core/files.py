"""Files: atomic writes, private to their owner; bounded archives; locks.

Everything that a party stores is private (mode 0600, in folders of mode 0700), except what is
written with ``for_others``: the federation file, certificates, figures and reports of a run. These
get the mode that the user's umask gives new files.

Numpy's archives, torch's files and skops' models are zip archives. A few bytes of one can unpack to
gigabytes, and an array's header can declare more numbers than the archive has bytes. Readers
allocate the declared size, so it is checked first.

Linux and macOS lock the open file itself, without another file. Windows has no ``fcntl``: there
:mod:`filelock` holds ``NAME.lock`` next to the file, and readers exclude one another too.
"""

import codecs
import contextlib
import errno
import glob
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from securevfl.core import checks
from securevfl.core.errors import ConfigError, StorageError

MOST_OF_JSON: Final = 64 * 2**20
"""Bytes of a JSON file, which takes some thirty times as much in memory."""

MOST_OF_SETTINGS: Final = 4 * 2**20
"""Bytes of a file of settings that people write."""

_PRIVATE: Final = 0o600
_FOR_OTHERS: Final = 0o666  # less the user's umask
_FOLDER: Final = 0o700
_SUFFIX_BYTES: Final = 8
_BESIDE: Final = re.compile(rf"\..+\.[0-9a-f]{{{2 * _SUFFIX_BYTES}}}")

BINARY: Final[int] = getattr(os, "O_BINARY", 0)
"""Flag for ``os.open`` that keeps Windows from changing line ends; 0 elsewhere."""


def write_bytes(path: Path, content: bytes, *, for_others: bool = False) -> None:
    """Write ``content`` to ``path`` through a synced temporary file in the same folder.

    Args:
        path: The file. Missing folders are created, private to their owner.
        content: The whole content.
        for_others: Whether other users may read the file, as far as the umask lets them.

    Raises:
        StorageError: If it cannot be written; the previous file is untouched.
    """
    _write(path, lambda file: file.write(content), for_others=for_others)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a private numpy archive (.npz) atomically, without a copy of it in memory.

    Raises:
        StorageError: As :func:`write_bytes`.
    """
    _write(path, lambda file: np.savez(file, allow_pickle=False, **arrays), for_others=False)


def copy_file(source: Path, path: Path) -> None:
    """Copy a file atomically to a private file, without holding it in memory.

    Raises:
        OSError: If ``source`` cannot be read.
        StorageError: As :func:`write_bytes`.
    """
    with source.open("rb") as content:
        _write(path, lambda file: shutil.copyfileobj(content, file), for_others=False)


def output_path(
    path: str | Path,
    inputs: Iterable[Path] = (),
    *,
    endings: Sequence[str] = (),
    option: str = "--out",
) -> Path:
    """Return the path of a file that a user has named for a command's result, to write it later.

    Args:
        path: The file.
        inputs: Files that the command reads, which may be missing.
        endings: Those that the name may have, where it is not that of a pipe or a device.
        option: What the user has named it by.

    Raises:
        ConfigError: If it is one of the inputs, a folder, in a folder that cannot be written, or
            has another ending.
    """
    path, what = Path(path), f"{option} {path}"
    if path.is_dir():
        raise ConfigError(f"{what}: is a folder; name a file")
    if path.exists() and not path.is_file():
        return path
    for read in inputs:
        with contextlib.suppress(OSError):
            if path.samefile(read):
                raise ConfigError(f"{what}: is {read}, which this command reads; name another file")
    if endings and not path.name.lower().endswith(tuple(endings)):
        known = " or ".join((", ".join(endings[:-1]), endings[-1])) if endings[1:] else endings[0]
        raise ConfigError(f"{what}: the name must end with {known}")
    require_writable_folder(Path(os.path.realpath(path)).parent, what=f"folder of {option}")
    return path


def write_output(path: Path, content: str | bytes, *, for_others: bool = True) -> None:
    """Write what :func:`output_path` has checked, where the user's name leads.

    Links are followed, and a file that is there keeps its mode and owner. What can't be replaced,
    as pipes, devices, files of several names and what standard output goes to, is written into.

    Args:
        path: The file.
        content: The whole content.
        for_others: Whether other users may read a new file, as far as the umask lets them.

    Raises:
        StorageError: If it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        there = path.stat() if path.exists() else None
        printed = there is not None and _is_standard_output(there)
        if there is None or (stat.S_ISREG(there.st_mode) and there.st_nlink == 1 and not printed):
            real = Path(os.path.realpath(path))
            _write(real, lambda file: file.write(data), for_others=for_others, like=there)
            return
        with path.open("ab" if printed else "wb") as file:
            file.write(data)
    except OSError as error:
        raise StorageError.of(path, error) from None


def _is_standard_output(file: os.stat_result) -> bool:
    try:
        return os.path.samestat(file, os.fstat(1))
    except OSError:  # it is closed
        return False


def _write(
    path: Path,
    write: Callable[[BinaryIO], object],
    *,
    for_others: bool,
    like: os.stat_result | None = None,
) -> None:
    temporary = beside(path)
    try:
        make_folder(path.parent)
        try:
            with open(temporary, "xb", opener=_opener(for_others=for_others)) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if like is not None:
                if hasattr(os, "chown"):
                    with contextlib.suppress(PermissionError):
                        os.chown(temporary, like.st_uid, like.st_gid)
                temporary.chmod(stat.S_IMODE(like.st_mode))
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError.of(path, error) from None


def write_text(path: Path, content: str, *, for_others: bool = False) -> None:
    """Write UTF-8 text atomically; see :func:`write_bytes`."""
    write_bytes(path, content.encode(), for_others=for_others)


def write_json(path: Path, value: object, *, for_others: bool = False) -> None:
    """Write ``value`` as indented JSON atomically; NaN and infinity are refused."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write_text(path, text, for_others=for_others)


def read_text(path: Path, *, most: int = MOST_OF_JSON) -> str:
    """Read text of at most ``most`` bytes; a larger file is refused before it is read.

    It is UTF-8, or has a byte-order mark, as Windows' programs write UTF-8 and UTF-16.

    Raises:
        OSError: If the system cannot read it, or it is too large.
        ValueError: If it is neither.
    """
    with path.open("rb") as file:
        # A device has no size.
        large = os.fstat(file.fileno()).st_size > most
        content = b"" if large else file.read(most + 1)
    if large or len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("is not text in UTF-8; save it as UTF-8") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of settings that people write.

    Raises:
        OSError: As :func:`read_text`.
        ValueError: If it is no TOML, in words that say what is wrong.
    """
    text = read_text(path, most=MOST_OF_SETTINGS)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply to be settings") from None
    except ValueError as error:  # a number of thousands of digits is no TOMLDecodeError
        escape = any(word in str(error) for word in ("escape", "hex value", "\\"))
        hint = f"; {checks.NO_BACKSLASH}" if escape else ""
        raise ValueError(f"is not TOML: {error}{hint}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a mapping that :func:`write_json` has written.

    Raises:
        ConfigError: If the file cannot be read or holds no JSON object.
    """
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: is not JSON; it was cut or changed") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds no figures")
    return content


def open_to_append(path: Path) -> int:
    """Open a private file for appending, creating it if missing; return its descriptor.

    Raises:
        OSError: As the operating system raises it.
    """
    make_folder(path.parent)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | BINARY, _PRIVATE)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, private to their owner.

    Raises:
        OSError: As the operating system raises it.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=_FOLDER, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names of its files survive a crash of the machine.

    Windows cannot open folders, and needs no such sync.

    Raises:
        OSError: As the operating system raises it.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Shares and some FUSE file systems have no such call; git and borg go on there too.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)


def require_writable_folder(path: Path, *, what: str = "run folder") -> None:
    """Create the folder ``path`` and check that a file can be written in it.

    Raises:
        ConfigError: Naming the folder and the system's reason.
    """
    probe = beside(path / "write-test")
    try:
        make_folder(path)
        probe.touch(mode=_PRIVATE)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{what} {path}: cannot be written ({error.strerror}); choose another with --out"
        ) from None


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files that killed processes have left in and below a folder.

    No process may be writing there.

    Raises:
        StorageError: If one cannot be removed.
    """
    for path in folder.rglob(".*"):
        _remove_if_unfinished(path)


def remove_unfinished_of(path: Path) -> None:
    """Remove temporary files that processes killed while writing ``path`` have left.

    Raises:
        StorageError: If one cannot be removed.
    """
    for other in path.parent.glob(f"{glob.escape(f'.{path.name}')}.*"):
        _remove_if_unfinished(other)


def beside(path: Path) -> Path:
    """Return an unused temporary name next to a file, for writing its content."""
    return path.with_name(f".{path.name}.{secrets.token_hex(_SUFFIX_BYTES)}")


def _remove_if_unfinished(path: Path) -> None:
    if _BESIDE.fullmatch(path.name):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError.of(path, error) from None


def _opener(*, for_others: bool) -> Callable[[str, int], int]:
    mode = _FOR_OTHERS if for_others else _PRIVATE
    return lambda name, flags: os.open(name, flags, mode)


_LONGEST_HEADER: Final = 10_000
"""Bytes of an array's header, the limit of numpy's own reader."""


def require_unpackable(content: BinaryIO | bytes, *, most: int | None = None) -> None:
    """Refuse a zip archive that would use too much memory.

    Args:
        content: The archive; an open file is left at its beginning.
        most: Most bytes of all its parts, unpacked; None: the archive must be uncompressed, as
            numpy and torch write theirs, so that its parts are no larger than itself.

    Raises:
        ValueError: If its parts are larger, an array's header declares more than its part holds, or
            it is no zip archive.
    """
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    size = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            if most is None and any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise ValueError("is packed, and nothing that is kept here is")
            unpacked = sum(part.file_size for part in parts)
            if unpacked > (size if most is None else most):
                raise ValueError(f"would unpack to {unpacked} bytes")
            for part in parts:
                if part.filename.endswith(".npy"):
                    _require_honest(archive, part)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"is no whole archive ({error})") from None
    finally:
        file.seek(0)


def _require_honest(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> None:
    """Refuse an array whose header declares more bytes than its part has."""
    with archive.open(part) as file:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise ValueError(f"{part.filename} is of another format")
        shape, _, dtype = read(file, max_header_size=_LONGEST_HEADER)
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0 or size > part.file_size:
            raise ValueError(f"{part.filename} says that it is larger than it is")


LOCKS_ITSELF: bool
"""True if the system locks an open file itself."""
try:
    import fcntl
except ImportError:  # Windows
    LOCKS_ITSELF = False
else:
    LOCKS_ITSELF = True


def lock(handle: int, path: Path, *, shared: bool) -> Callable[[], None]:
    """Lock a file without waiting.

    Args:
        handle: The open file.
        path: The file's path.
        shared: Whether other processes may hold it too, for reading.

    Returns:
        A function that releases the lock. Where the lock is on the file itself, closing ``handle``
        releases it too.

    Raises:
        BlockingIOError: If another process holds the lock.
        OSError: As the operating system raises it.
    """
    if LOCKS_ITSELF:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return lambda: None
    import filelock

    beside = filelock.FileLock(f"{path}.lock", timeout=0, thread_local=False)
    try:
        beside.acquire()
    except filelock.Timeout:
        raise BlockingIOError(f"{path} is locked") from None
    return beside.release
