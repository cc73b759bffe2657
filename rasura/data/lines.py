"""Text files in any usual encoding, line by line, as written by Excel, exports and editors."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from pathlib import Path

from rasura.core.errors import InputError

PIECE = 1 << 20
"""Number of bytes read at once."""

MAX_LINE = 1 << 24
"""Maximum characters of a line."""

_ENDS = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")

_MARKS = ((codecs.BOM_UTF8, "UTF-8"), (codecs.BOM_UTF16_LE, "UTF-16-LE"), (codecs.BOM_UTF16_BE, "UTF-16-BE"))

_SIGNS = "¡¢£¤¥¦§¨¬¯±²³´¶¸¹¼½¾¿×÷†‡‰ˆ˜"
_LETTER = r"[^\W\d_]"
_STRANGE = re.compile(
    rf"(?!(.)\1\1)(?:(?=[^\x00-\x7f])(?:{_LETTER}|[{_SIGNS}])){{3}}"  # three in a row that are not a to z
    rf"|{_LETTER}[¡¢£¤¥¦§¬¯²³¶¹¼½¾¿†‡‰][a-z]"  # a sign within a word
    rf"|[a-z][ŠŽŸÀ-ÖØ-Þ][a-zß-öø-ÿ]|[a-z][ŽŸ]"  # a capital within a word
    rf"|{_LETTER}[„‚]{_LETTER}"  # a quote that opens within a word
)
"""What words of Western European languages do not have."""


class Lines:
    """The lines of ``path`` with their ends, decoded while they are read.

    A byte order mark decides between UTF-8 and UTF-16. Without one, the encoding stays undecided until the first byte that
    is not ASCII: it is UTF-8 if the piece around that byte decodes as such, otherwise cp1252, which includes the letters of
    Latin-1. ``encoding`` is the encoding found so far. Iterating raises ``InputError`` for undecodable bytes, zero bytes,
    lines above ``MAX_LINE``, and where that piece is not Western European text in cp1252.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.encoding = "ASCII"
        self._decoder: codecs.IncrementalDecoder | None = None
        self._kept = b""

    def __iter__(self) -> Iterator[str]:
        ends = io.IncrementalNewlineDecoder(None, translate=False)
        rest, number = "", 1
        with self.path.open("rb") as file:
            piece = self._marked(file.read(PIECE))
            while True:
                following = file.read(PIECE)
                # The newline decoder holds a final \r back: its \n may begin the next piece.
                text = ends.decode(self._decoded(piece, number, not following), not following)
                if "\0" in text:
                    raise InputError(f"{self.path}: zero bytes near line {number}; expected text, saved as UTF-8")
                *whole, last = _ENDS.split(rest + text)
                for line in whole:
                    yield self._checked(line, number)
                    number += 1
                rest = self._checked(last, number)
                if not following:
                    break
                piece = following
        if rest:
            yield rest

    def _checked(self, line: str, number: int) -> str:
        if len(line) > MAX_LINE:
            raise InputError(f"{self.path}: line {number} has more than {MAX_LINE} characters; expected one row per line")
        return line

    def _marked(self, piece: bytes) -> bytes:
        """``piece``, the file's first, without its byte order mark, which sets the encoding."""
        for mark, name in _MARKS:
            if piece.startswith(mark):
                self._decide(name)
                return piece[len(mark) :]
        return piece

    def _decide(self, encoding: str) -> None:
        self.encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()

    def _decoded(self, piece: bytes, line: int, final: bool) -> str:
        try:
            if self._decoder is None:
                piece, self._kept = self._kept + piece, b""
                if piece.isascii():
                    return piece.decode("ascii")
                if not final:
                    piece, self._kept = _without_half_a_character(piece)
                    if piece.isascii():
                        return piece.decode("ascii")
                self._decide(self._guessed(piece))
                piece, self._kept = piece + self._kept, b""
            assert self._decoder is not None
            return self._decoder.decode(piece, final)
        except UnicodeDecodeError:
            raise InputError(
                f"{self.path}: read as {self.encoding}, but bytes after line {line} are not valid in it; save "
                "the file as UTF-8"
            ) from None

    def _guessed(self, piece: bytes) -> str:
        try:
            piece.decode("utf-8")
            return "UTF-8"
        except UnicodeDecodeError:
            pass
        # Text of one byte a letter hardly ever holds a valid UTF-8 sequence: a file that has both kinds is damaged UTF-8.
        valid = sum(not c.isascii() for c in piece.decode("utf-8", errors="ignore"))
        broken = piece.decode("utf-8", errors="replace").count("\ufffd")
        if valid >= broken:
            return "UTF-8"
        if not _western(piece.decode("cp1252", errors="ignore")):
            raise InputError(
                f"{self.path} is not UTF-8, and read as cp1252 it is not text of a Western European language; save it as "
                "UTF-8, in an editor or with iconv -f ENCODING -t UTF-8"
            )
        return "cp1252"


def _western(text: str) -> bool:
    """Whether few of the words with letters beyond ASCII are ``_STRANGE``, as in another encoding read as cp1252."""
    words = [w for w in text.split() if not w.isascii()]
    return 5 * sum(bool(_STRANGE.search(w)) for w in words) < max(1, len(words))


def _without_half_a_character(piece: bytes) -> tuple[bytes, bytes]:
    """``piece`` without its last bytes if they may begin a UTF-8 character that continues in the next piece; and these
    bytes."""
    for size in range(1, min(3, len(piece)) + 1):
        byte = piece[-size]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (piece[:-size], piece[-size:]) if needed > size else (piece, b"")
    return piece, b""
