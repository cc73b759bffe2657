"""What an attack has read so far, for a listener, while it runs.

An attack reports with ``tell``. Without a listener nothing is computed, and with one nothing else changes: what is told is
never read back. A listener must hold no private text, since it runs inside the attack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rasura.core.values import Reconstruction

Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True)
class SoFar:
    """A guess that may still change; nothing is certain yet.

    ``tokens``: one sequence of ids for each text, ``UNKNOWN`` at places that are open. Unless ``ordered``, the ids of a text
    are a bag, which may hold the tokens of other texts in the batch, too.
    """

    tokens: tuple[tuple[int, ...], ...]
    ordered: bool = True


@dataclass(frozen=True)
class Stage:
    """A portfolio begins its member ``attack``. ``guess``: the best of those before it, which it would return now; None
    without any."""

    attack: str
    guess: Reconstruction | None


Listener = Callable[[SoFar], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)
_WATCHER: ContextVar[Callable[[Stage], None] | None] = ContextVar("watcher", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Attacks that run inside, in this thread, report to ``listener``."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(read: Callable[[], Tokens], *, ordered: bool = True) -> None:
    """Report what ``read`` returns, which is called only where somebody listens. It must draw nothing at random.

    >>> with listening(print):
    ...     tell(lambda: [[7, 8]])
    SoFar(tokens=((7, 8),), ordered=True)
    >>> tell(lambda: [[7, 8]])
    """
    listener = _LISTENER.get()
    if listener is not None:
        listener(SoFar(tuple(tuple(map(int, text)) for text in read()), ordered))


def interruptible(run: Callable[[], Reconstruction], begun: Callable[[Stage], None]) -> Reconstruction:
    """What ``run`` returns. Where the user interrupts it, the best guess so far of its portfolio, whose details name the
    attack that was ``stopped``; without one, the interruption. ``begun`` hears of every member that begins."""
    last = Stage("", None)

    def hear(stage: Stage) -> None:
        nonlocal last
        last = stage
        begun(stage)

    token = _WATCHER.set(hear)
    try:
        return run()
    except KeyboardInterrupt:
        if last.guess is None:
            raise
        return replace(last.guess, details={**last.guess.details, "stopped": last.attack})
    finally:
        _WATCHER.reset(token)


def begin(attack: str, guess: Callable[[], Reconstruction | None]) -> None:
    """Tell that the member ``attack`` of a portfolio begins, where somebody watches; ``guess`` as in ``Stage``."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(Stage(attack, guess()))
