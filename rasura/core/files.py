"""Files that are written completely or not at all, and small files from elsewhere that are read within a limit. No torch."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rasura.core.errors import InputError


def name_for(text: str) -> str:
    """A name for a file or folder of ``text``, a protection as it is written, that no other text has.

    Where letters in upper case count as others too, and where they do not. A colon before a digit is read back from the
    name; a text that loses more has a hash behind its name.

    >>> name_for("frozen-embeddings+dp-sgd:1.0")
    'frozen-embeddings+dp-sgd-1.0'
    >>> name_for("ghost:k=40")
    'ghost-k=40_b3d395fcdd47'
    """
    name = re.sub(r"[^a-z0-9.=+-]", "-", text)[:100]
    if re.sub(r"-(?=[0-9])", ":", name) == text:
        return name
    return f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def write_whole(path: str | Path, content: str | bytes, *, private: bool = True, replace: bool = True) -> None:
    """Write ``content`` so that a reader finds either the old file or the new one, never a part, even after a kill.

    ``private``: only its owner can read it, from the first byte on; otherwise the process's umask decides. ``replace``:
    whether an existing file is replaced. Raises ``InputError`` if the file cannot be written, or exists and must not be
    replaced.
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    part = _part(target)
    try:
        number = _new(part, 0o600 if private else 0o666)
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
        raise _taken(target) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise _unusable(target, error) from None
    _keep_name(target.parent)


def write_new(
    folder: Path, secret: Mapping[str, str | bytes], public: Mapping[str, str | bytes] | None = None
) -> tuple[Path, ...]:
    """Write new files into ``folder``, by name: all of them, or none. Their paths, in this order.

    Only their owner can read the ``secret`` ones. The folder is made where it is missing. Raises ``InputError`` where one of
    the files exists, before any is written, and as ``write_whole`` does.
    """
    files = [(folder / name, data, True) for name, data in secret.items()]
    files += [(folder / name, data, False) for name, data in (public or {}).items()]
    for path, *_ in files:
        if os.path.lexists(path):
            raise _taken(path)
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data, private in files:
            write_whole(path, data, private=private, replace=False)
            written.append(path)
    except BaseException as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"the folder {folder} cannot be made ({error.strerror}); choose another place") from None
        raise
    return tuple(written)


def check_writable(target: str | Path) -> None:
    """Raises ``InputError`` where no file can be written at ``target``: for a check before long work."""
    path = Path(target)
    trial = _part(path)
    try:
        os.close(_new(trial))
        trial.unlink()
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from None


def _part(target: Path) -> Path:
    """A new name beside ``target``, for what is to be moved there."""
    return target.with_name(f".{target.name[:64]}.{secrets.token_hex(8)}.part")


def _new(path: Path, mode: int = 0o600) -> int:
    """The descriptor of a new file at ``path``, which must not exist."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def _taken(path: Path) -> InputError:
    return InputError(f"{path} already exists and is not overwritten; remove it or choose another name")


def make_private(target: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` write a file that only its owner can read, whatever the library behind it does, and that is there whole
    or not at all."""
    part = _part(target)
    try:
        os.close(_new(part))
        write(part)
        part.chmod(0o600)  # of another file in its place, too
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def appended(target: Path) -> Iterator[BinaryIO]:
    """``target``, to read and to add to its end, for this run alone.

    Only its owner can read it, and no other run adds to it. It is made where it is missing. Raises ``InputError`` where
    another run has it open, and where it cannot be made its owner's alone.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        file = os.fdopen(os.open(target, flags, 0o600), "r+b")
    except (OSError, ValueError) as error:
        raise _unusable(target, error) from None
    with file:
        try:
            if hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), 0o600)  # of one that is there already, too
            _lock(file)
            here = os.path.samestat(os.stat(target), os.fstat(file.fileno()))
        except (BlockingIOError, FileNotFoundError):
            here = False
        except OSError as error:
            raise _unusable(target, error) from None
        if not here:  # the other run has it, or has just ended with it
            raise InputError(f"{target} is being written by another run; wait for it, or choose another name")
        yield file


def _lock(file: BinaryIO) -> None:
    """Hold ``file`` until it is closed, or the process ends. Raises ``BlockingIOError`` where another holds it."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 30)  # a place behind all that is written, since others cannot read what is locked
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError:
            raise BlockingIOError from None
        file.seek(0)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unusable(path: Path, error: OSError | ValueError) -> InputError:
    return InputError(f"{path} cannot be written ({_why(error)}); choose another place")


def _why(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or "not a valid file name"


def _keep_name(folder: Path) -> None:
    """Make the new name survive a power cut, on systems that can synchronise folders."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def file_digest(path: str | Path, what: str) -> str:
    """What tells the content of a file from any other. Raises ``InputError``, which calls it ``what``, where it cannot be
    read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise InputError(f"the {what} {path} cannot be read ({_why(error)})") from None


def read_limited(path: str | Path, what: str, max_bytes: int) -> tuple[bytes, bool]:
    """The content of a file of at most ``max_bytes``, and whether anyone but its owner can read or write it. Raises
    ``InputError``, which calls it ``what``, if it is larger, is not a plain file or cannot be read.
    """
    try:
        # A pipe must not keep the reader waiting.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(number, "rb") as file:
            about = os.fstat(number)
            if not stat.S_ISREG(about.st_mode):
                raise InputError(f"the {what} {path} is not a file")
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the {what} {path} cannot be read ({_why(error)})") from None
    if len(data) > max_bytes:
        raise InputError(f"the {what} {path} has more than {max_bytes} bytes; expected a smaller file")
    return data, bool(about.st_mode & 0o077)


def read_private(path: str | Path, what: str, max_bytes: int) -> bytes:
    """As ``read_limited``, for a file that only its owner may read. Raises ``InputError`` if others can."""
    data, others = read_limited(path, what, max_bytes)
    if others:
        raise InputError(f"the {what} {path} can be read by other users; run: chmod 600 {path}")
    return data
