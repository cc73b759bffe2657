"""``python -m fuzz --inputs 1000000``: every target, or ``--target wire``; stopped and started again, it goes on."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fuzz.running import MAX_GROWTH, run
from fuzz.targets import TARGETS


def main() -> int:
    """Exit 1 where an input failed, or memory grew beyond 300 MB."""
    parser = argparse.ArgumentParser(prog="fuzz", description="Damaged inputs for all that reads what strangers send.")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all; targets get fixed shares of them")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this one, with all --inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="folder for seeds, progress and failing inputs")
    given = parser.parse_args()
    chosen = given.target or list(TARGETS)
    whole = sum(TARGETS[name].share for name in chosen)
    bad = 0
    for name in chosen:
        until = max(1, round(given.inputs * TARGETS[name].share / whole))
        place = given.out / f"{name}-{given.seed}"
        state = run(name, place, given.seed, until)
        told = {
            "target": name, "inputs": state.done, "refused": state.refused, "failed": state.failed,
            "seconds": round(state.seconds, 1), "per_second": round(state.done / max(state.seconds, 1e-9)),
            "growth_mb": round(state.growth / 1e6, 1),
        }  # fmt: skip
        sys.stdout.write(json.dumps(told) + "\n")
        for number, why in state.failures:
            sys.stdout.write(f"  input {number} ({place}/failure-{number}.bin): {why}\n")
        sys.stdout.flush()
        bad += state.failed + (state.growth > MAX_GROWTH)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
