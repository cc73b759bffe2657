"""The command line as a test calls it."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

from rasura.cli import main


def rasura_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``rasura`` with ``arguments``, in this process: a new one would spend seconds on imports at each call."""
    words, out, err = ["rasura", *map(str, arguments)], io.StringIO(), io.StringIO()

    def warned(*about: Any, **_: Any) -> None:
        err.write(warnings.formatwarning(*about[:4]))

    log, code = logging.StreamHandler(err), 0
    log.setLevel(logging.WARNING)
    logging.getLogger().addHandler(log)
    try:
        with mock.patch.object(sys, "argv", words), redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
            warnings.resetwarnings()  # to the filters that Python starts with
            for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", kind)
            warnings.showwarning = warned
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        logging.getLogger().removeHandler(log)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def rasura_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``rasura`` with ``arguments`` in a process of its own, as a person starts it."""
    words = [sys.executable, "-m", "rasura", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)


def refused(*arguments: object) -> str:
    """What ``rasura`` says where it refuses ``arguments``: one line, exit code 2 and no traceback."""
    return _one_line(rasura_command(*arguments))


def refused_process(*arguments: object) -> str:
    """``refused`` in a process of its own."""
    return _one_line(rasura_process(*arguments))


def _one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr
