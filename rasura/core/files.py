"""Files that are whole or not there, and small files from elsewhere that are read within a limit. No torch."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from rasura.core.errors import InputError


def write_whole(path: str | Path, content: str | bytes, *, private: bool = True, replace: bool = True) -> None:
    """Write ``content`` so that a reader, or a kill at any point, finds the old file or the new one, never a part.

    ``private``: its owner alone can read it, from its first byte on; else the process's umask decides. ``replace``: whether
    an existing file gives way. Raises ``InputError`` where the file cannot be written, or exists and must not give way.
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    part = target.with_name(f".{target.name[:64]}.{secrets.token_hex(8)}.part")
    try:
        number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        try:
            with os.fdopen(number, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            if replace:
                os.replace(part, target)
            else:
                os.link(part, target)
        finally:
            part.unlink(missing_ok=True)
    except FileExistsError:
        raise InputError(f"{target} exists already and is not overwritten; remove it or choose another name") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        why = getattr(error, "strerror", None) or "not a name of a file"
        raise InputError(f"{target} cannot be written ({why}); choose another place") from None
    _keep_name(target.parent)


def _keep_name(folder: Path) -> None:
    """Have the new name outlast a power cut, where the system lets folders be synchronised."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def read_limited(path: str | Path, what: str, most: int) -> tuple[bytes, bool]:
    """The bytes of a file of at most ``most``, and whether others than its owner can read or write it.

    Raises ``InputError``, which calls it ``what``, for one that is longer, that is not a plain file or cannot be read.
    """
    try:
        # A pipe must not keep the reader waiting.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(number, "rb") as file:
            about = os.fstat(number)
            if not stat.S_ISREG(about.st_mode):
                raise InputError(f"the {what} {path} is not a file")
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        why = getattr(error, "strerror", None) or "not a name of a file"
        raise InputError(f"the {what} {path} cannot be read ({why})") from None
    if len(data) > most:
        raise InputError(f"the {what} {path} has more than {most} bytes, which no such file has")
    return data, bool(about.st_mode & 0o077)


def read_private(path: str | Path, what: str, most: int) -> bytes:
    """As ``read_limited``, for a file that its owner alone may read. Raises ``InputError`` where others can."""
    data, others = read_limited(path, what, most)
    if others:
        raise InputError(f"the {what} {path} can be read by others; chmod 600 it")
    return data
