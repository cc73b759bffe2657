"""How things go wrong, in words for the person who can mend it. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping


class InputError(ValueError):
    """The user's input was wrong: one line that says what was found, what was expected and what to do."""


class MissingExtra(InputError):
    """An optional library is not installed; the message names the extra."""


class AttackFailed(RuntimeError):
    """The attack ran and found nothing that it can stand behind; recorded as ``failed`` with this reason.

    ``details``: plain figures for the record.
    """

    def __init__(self, reason: str = "", details: Mapping[str, float | int | str | bool | None] | None = None) -> None:
        super().__init__(reason)
        self.details = dict(details or {})


class NotApplicable(RuntimeError):
    """The attack cannot be tried on this observation; recorded as ``not_applicable`` with this reason."""


class NotSent(RuntimeError):
    """A protection held the update back: there is none to attack. Recorded as ``not_applicable`` with this reason."""


class Unavailable(RuntimeError):
    """A metric cannot be computed on this machine; the message says what is missing and the remedy."""


def broken(error: Exception) -> str:
    """The kind of an error and where it arose. Words that are not ours may hold private text, so they are left out."""
    if isinstance(error, AttackFailed | InputError):
        return f"{type(error).__name__}: {error}"
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place, trace = f" in {code.co_name} ({code.co_filename.rpartition('/')[2]}, line {trace.tb_lineno})", trace.tb_next
    return f"{type(error).__name__}{place}"
