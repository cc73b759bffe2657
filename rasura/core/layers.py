"""Which parameters are of one layer."""

from __future__ import annotations

from collections.abc import Iterable


def layers_of(names: Iterable[str]) -> list[list[str]]:
    """The parameters ``names``, layer by layer: those of one module are a layer. It depends on the names alone.

    >>> layers_of(["head.weight", "body.weight", "head.bias"])
    [['head.weight', 'head.bias'], ['body.weight']]
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return list(found.values())
