"""The encoding of a text file: recognised where only one reading is possible, else asked for."""

import codecs
import re
from pathlib import Path
from typing import Final

import charset_normalizer

from securevfl.core.errors import DataError
from securevfl.data.sources.opening import opened
from securevfl.data.sources.settings import written

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
_SHOWN: Final = 30
_GUESSED_FROM: Final = 1 << 18


def recognised_encoding(head: bytes, *, where: str) -> str:
    """Return the encoding that a file's first bytes tell: UTF-8, UTF-16 or UTF-32.

    UTF-8 is only what it may be: bytes that are none may come further down, and fail there.

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

    It shows the first word that is none, as the likeliest encoding reads it, so that the reader can
    tell whether that is the right one.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    line, before = 1, b""
    with opened(path) as stream:
        while block := stream.read(_GUESSED_FROM):
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                # The decoder may have kept some bytes of the block before.
                kept = error.object[: len(error.object) - len(block)]
                content, start = error.object, error.start
                line += block[: max(0, start - len(kept))].count(b"\n")
                return _line(before + content, len(before) + start, line, encoding, where=where)
            line += block.count(b"\n")
            before = block[-_SHOWN:]
    return DataError(f"{where}: is not {encoding}")


def _line(content: bytes, place: int, line: int, encoding: str, *, where: str) -> DataError:
    found = f"{where}: can't be read: is not {encoding.removesuffix('-sig').upper()} (line {line})"
    if encoding not in ("utf-8", "utf-8-sig"):
        return DataError(f"{found}; name another encoding, or leave reading.encoding out")
    best = charset_normalizer.from_bytes(content, cp_isolation=list(_COMMON)).best()
    guess = "windows-1252" if best is None else _usual_name(best.encoding)
    around = content[max(0, place - _SHOWN) : place + _SHOWN].decode(guess, errors="replace")
    middle = len(content[max(0, place - _SHOWN) : place].decode(guess, errors="replace"))
    start = max((m.end() for m in re.finditer(r"\W", around[:middle])), default=0)
    word = re.match(r"\w+", around[start:])
    shown = f", which reads {word.group()!r}" if word else ""
    return DataError(f"{found}; it may be {guess}{shown}: write {written(encoding=guess)}")


def _usual_name(name: str) -> str:
    # Western texts are alike in these; Windows-1252 is what programs write.
    return "windows-1252" if name in _WESTERN else name.replace("_", "-")
