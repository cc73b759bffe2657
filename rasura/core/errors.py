"""The errors of the package. Each message is written for the person who can fix the problem. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping


class InputError(ValueError):
    """The user's input was wrong. The message is one line: what was found, what was expected and what to do."""


class Malformed(InputError):
    """A method of somebody returned something of another form than it must; the message names the method."""


class MissingExtra(InputError):
    """An optional library is not installed; the message names the extra."""


class AttackFailed(RuntimeError):
    """The attack ran and found nothing reliable; recorded as ``failed`` with this reason.

    ``details``: plain figures for the record.
    """

    def __init__(self, reason: str = "", details: Mapping[str, float | int | str | bool | None] | None = None) -> None:
        super().__init__(reason)
        self.details = dict(details or {})


class NotApplicable(RuntimeError):
    """The attack cannot be tried on this observation; recorded as ``not_applicable`` with this reason."""


class Unseen(NotApplicable, InputError):
    """One client's message says nothing about what is read from the sum: an audit records that, a training stops."""


UNSENT = "nothing is sent"
"""What the reason of ``NotSent`` begins with, in every record."""


class NotSent(RuntimeError):
    """A protection held the update back, so there is nothing to attack. Recorded as ``not_applicable`` with this reason."""

    def __str__(self) -> str:
        return f"{UNSENT}: {super().__str__()}"


class Unavailable(RuntimeError):
    """A metric cannot be computed on this machine; the message says what is missing and the remedy."""


FAULTS: tuple[type[BaseException], ...] = (Exception, SystemExit)
"""What a fault in a method is caught by. ``sys.exit`` in a wrapped program would otherwise end the run, with exit code 0."""


def _own_words(error: BaseException) -> bool:
    """Whether the message is Rasura's own, which names no text. ``core.values`` says it of its errors by ``of_rasura``."""
    return isinstance(error, AttackFailed | InputError) or getattr(error, "of_rasura", False)


def broken(error: BaseException) -> str:
    """The type of an error and where it arose. The messages of other libraries may contain private text, so they are left
    out."""
    if _own_words(error):
        return f"{type(error).__name__}: {error}"
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place, trace = f" in {code.co_name} ({code.co_filename.rpartition('/')[2]}, line {trace.tb_lineno})", trace.tb_next
    return f"{type(error).__name__}{place}"


def in_its_words(error: BaseException) -> str:
    """As ``broken``, with the first line of the error's own message: only where nothing private has been read yet."""
    words = str(error).strip().partition("\n")[0]
    return broken(error) if not words or _own_words(error) else f"{broken(error)}: {words[:200]}"
