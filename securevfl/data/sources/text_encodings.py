"""The encoding of a text file: recognised where only one reading is possible, else asked for."""

import codecs
import contextlib
import re
from pathlib import Path
from typing import Final

from securevfl.core.errors import DataError
from securevfl.data.sources.settings import reading_entry
from securevfl.data.sources.text_streams import open_table

# In this order: the mark of UTF-32 begins with that of UTF-16.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

# Texts in the Latin alphabet without a mark of their encoding have NUL as every other byte.
_LEAST_SHARE_OF_ZEROS: Final = 0.3

# Of texts as short as names, rarer encodings are guessed as often as right ones.
_COMMON: Final = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257"),
    *("koi8_r", "shift_jis", "gb18030", "big5", "euc_kr", "cp437", "cp850", "mac_roman"),
)
_WESTERN: Final = ("cp1252", "cp1250", "cp1254", "cp1257")
_SHOWN_AROUND: Final = 30
_GUESSED_FROM: Final = 1 << 18


def recognised_encoding(head: bytes, *, where: str) -> str:
    """Return the encoding that a file's first bytes show: UTF-8, UTF-16 or UTF-32.

    UTF-8 is only possible: other bytes may follow, and fail later.

    Raises:
        DataError: If there are NUL bytes that no encoding explains.
    """
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    if b"\0" not in head:
        return "utf-8"
    for encoding, zeros in (("utf-16-le", head[1::2]), ("utf-16-be", head[0::2])):
        others = head[0::2] if encoding == "utf-16-le" else head[1::2]
        share = zeros.count(0) / max(1, len(zeros))
        if share > _LEAST_SHARE_OF_ZEROS and b"\0" not in others:
            return encoding
    raise DataError(f"{where}: is not a text file, as it holds NUL bytes; save the table as CSV")


def no_such_encoding(path: Path, encoding: str, *, where: str) -> DataError:
    """Return the line for a file that is not in the encoding given or recognised.

    It shows the first word that is not, as the likeliest encoding reads it, so that the user can
    judge whether that is the right one.
    """
    problem = f"{where}: can't be read: is not {encoding.removesuffix('-sig').upper()}"
    other = "; name another encoding, or leave reading.encoding out"
    if encoding.lower().startswith(("utf-16", "utf-32", "utf16", "utf32")):
        return DataError(problem + other)  # there a line's end is not one byte
    with open_table(path) as stream:
        for line, content in enumerate(stream, 1):
            try:
                content.decode(encoding)
            except UnicodeDecodeError as error:
                if encoding not in ("utf-8", "utf-8-sig"):
                    return DataError(f"{problem} (line {line}){other}")
                guess, shown = _guess_encoding(content + stream.read(_GUESSED_FROM), error.start)
                return DataError(
                    f"{problem} (line {line}); it may be {guess}{shown}: write "
                    f"{reading_entry(encoding=guess)}"
                )
    return DataError(problem + other)


def _guess_encoding(content: bytes, place: int) -> tuple[str, str]:
    """Return the likeliest encoding, and how it reads the word at a place.

    Without the package that compares encodings it is the one of Western programs.
    """
    guess, best = "windows-1252", None
    with contextlib.suppress(ImportError):
        import charset_normalizer

        best = charset_normalizer.from_bytes(content, cp_isolation=list(_COMMON)).best()
    # Of short words, rarer encodings are guessed that read a letter as a sign.
    if best is not None and (_only_letters(content, best.encoding) or not _only_letters(content)):
        # Western texts are alike in these; Windows-1252 is what programs write.
        guess = guess if best.encoding in _WESTERN else best.encoding.replace("_", "-")
    begin = max(0, place - _SHOWN_AROUND)
    around = content[begin : place + _SHOWN_AROUND].decode(guess, errors="replace")
    middle = len(content[begin:place].decode(guess, errors="replace"))
    start = max((m.end() for m in re.finditer(r"\W", around[:middle])), default=0)
    word = re.match(r"\w+", around[start:])
    return guess, f", which reads {word.group()!r}" if word else ""


def _only_letters(content: bytes, encoding: str = "cp1252") -> bool:
    """Whether an encoding reads all that is no ASCII as letters."""
    text = content.decode(encoding, errors="replace")
    return all(letter.isalpha() for letter in text if not letter.isascii())
