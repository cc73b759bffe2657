"""One target in a process of its own: ``python -m fuzz.worker TARGET PLACE SEED UNTIL FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from fuzz.running import run_here
from fuzz.targets import TARGETS


def main(arguments: list[str]) -> int:
    """Run inputs until all are done."""
    name, place, seed, until, folder = arguments
    target = TARGETS[name](Path(folder))
    try:
        run_here(target, Path(place), int(seed), int(until))
    finally:
        target.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
