"""The command line."""

from __future__ import annotations

import logging
import os
import warnings

from rasura.cli import (
    about,
    account,
    audit,
    calibrate,
    canaries,
    check_dp,
    diagnose,
    evidence,
    ghost,
    keys,
    membership,
    new,
    obfuslm,
    playground,
    read,
    service,
    study,
    train,
)
from rasura.cli.panels import panelled
from rasura.cli.shared import app, err, say
from rasura.core.errors import InputError
from rasura.core.limits import cores_here

__all__ = [
    "about", "account", "app", "audit", "calibrate", "canaries", "check_dp", "diagnose", "evidence", "ghost", "keys", "main",
    "membership", "new", "obfuslm", "playground", "read", "service", "study", "train",
]  # fmt: skip

_ORDER = (
    "audit", "read", "report", "compare", "bundle", "reproduce", "calibrate", "train", "membership",
    "diagnose", "account", "check-dp", "keys", "new", "playground", "study", "serve", "list", "doctor",
)  # fmt: skip
app.registered_commands.sort(key=lambda c: _ORDER.index(c.name or getattr(c.callback, "__name__", "")))
panelled(app)


class Told(logging.Handler):
    """Prints each line that the data readers log once: the encoding, separator, columns and labels that they found."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self.lines:
            self.lines.add(line)
            say(line, to=err)


def main() -> None:
    """Entry point: an error that the user can fix prints one line and exits with code 2, without a traceback."""
    if (cores := cores_here()) < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))  # PyTorch takes the machine's, also in a container with a share
    # How these libraries will call each other in a later version is nothing to who runs a command.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    log, told = logging.getLogger("rasura.data"), Told()
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        app(standalone_mode=True)
    except InputError as error:
        say(f"rasura: {error}", to=err, style="bold")
        raise SystemExit(2) from None
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # PyTorch's, which not every command imports
            raise
        say(f"rasura: the GPU has too little free memory: {str(error).partition('.')[0]}. Finished work is kept. Pass "
            "--device cpu, or put fewer texts into memory at once", to=err, style="bold")  # fmt: skip
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        log.removeHandler(told)
