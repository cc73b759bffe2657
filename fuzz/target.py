"""What a target is: seeds, how they are damaged, and the code that reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from random import Random

from fuzz.mutations import damaged


class Target(ABC):
    """One reader of what strangers send. ``share``: of all inputs, how many of a thousand it gets. ``folder``: for files,
    in memory where the system has such a place."""

    name: str
    share: int

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def seeds(self) -> list[bytes]:
        """Sound inputs, from the package's own writers; made once, and kept with the run."""

    @abstractmethod
    def read(self, data: bytes) -> None:
        """Have ``data`` read. Raises ``InputError`` where it is refused; whatever else it raises is a failure."""

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        """A damaged input."""
        return damaged(rng, rng.choice(seeds), seeds)

    def close(self) -> None:  # noqa: B027  # most targets have nothing to close
        """Let go of what was opened."""


def write_shared(path: Path, data: bytes) -> Path:
    """Write a small file that is its owner's alone."""
    path.write_bytes(data)
    path.chmod(0o600)
    return path
