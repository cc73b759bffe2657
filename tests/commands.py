"""The command line as a test calls it."""

from __future__ import annotations

import subprocess
import sys


def rasura_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rasura", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=280
    )


def refused(*arguments: object) -> str:
    done = rasura_command(*arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr
