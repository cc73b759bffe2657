"""The command line."""

from __future__ import annotations

import logging

from rasura.cli import about, account, audit, calibrate, keys, membership, new, obfuslm, service, study, train
from rasura.cli.shared import app, err
from rasura.errors import InputError

__all__ = [
    "about", "account", "app", "audit", "calibrate", "keys", "main", "membership", "new", "obfuslm", "service", "study",
    "train",
]  # fmt: skip

_ORDER = (
    "audit", "read", "report", "calibrate", "train", "membership", "account", "keys", "new", "study", "serve", "list",
    "doctor",
)  # fmt: skip
app.registered_commands.sort(key=lambda c: _ORDER.index(c.name or getattr(c.callback, "__name__", "")))


def tell_how_files_were_read() -> None:
    """Print what the readers of data files log, each line once: encoding, separator, columns and labels that they found."""
    told: set[str] = set()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (line := record.getMessage()) not in told:
                told.add(line)
                err.print(line, markup=False, highlight=False, soft_wrap=True)

    log = logging.getLogger("rasura.data")
    log.addHandler(Told())
    log.setLevel(logging.INFO)


def main() -> None:
    """Entry point: one line and exit code 2 for what the user can mend, never a traceback."""
    tell_how_files_were_read()
    try:
        app(standalone_mode=True)
    except InputError as error:
        err.print(f"rasura: {error}", markup=False, highlight=False, soft_wrap=True, style="bold")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
