"""What an attack has read so far, for a listener, while it runs.

An attack reports with ``tell``. Without a listener nothing is computed, and with one nothing else changes: what is told is
never read back. A listener must hold no private text, since it runs inside the attack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True)
class SoFar:
    """A guess that may still change; nothing is certain yet.

    ``tokens``: one sequence of ids for each text, ``UNKNOWN`` at places that are open. Unless ``ordered``, the ids of a text
    are a bag, which may hold the tokens of other texts in the batch, too.
    """

    tokens: tuple[tuple[int, ...], ...]
    ordered: bool = True


Listener = Callable[[SoFar], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


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
