"""Names and options in the form that users write: ``k=30/overlap=0.2/lemma=false``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rasura.core.errors import InputError


def parts_of(protection: str) -> list[str]:
    """The parts of ``protection`` as they are written. A plus within quotes or at the end of a name joins nothing.

    >>> parts_of("frozen-embeddings+dropout:0.1"), parts_of('santext+:epsilon=1/vectors="a+b.vec"')
    (['frozen-embeddings', 'dropout:0.1'], ['santext+:epsilon=1/vectors="a+b.vec"'])
    """
    return [part.strip() for part in re.findall(r'(?:"[^"]*"|[^+"]|\+(?=[:/]|$)|")+', protection)]


def name_of(part: str) -> str:
    """The name in one part of a protection: ``"dp-sgd"`` of ``"dp-sgd:1.0/clip=0.5"``."""
    return part.strip().partition(":")[0].partition("/")[0]


def names_of(protection: str) -> tuple[str, ...]:
    """``"frozen-embeddings+dropout:0.1"`` as the names of its parts."""
    return tuple(map(name_of, parts_of(protection)))


def public_names(protections: Iterable[str]) -> dict[str, str]:
    """Each of ``protections`` as others may see it: of files the names alone, since where they lie may say whose they are.
    Those that differ in folders alone are numbered.

    >>> public_names(['custext+:epsilon=1/vectors="/home/anna/a.vec"', 'custext+:epsilon=1/vectors="/srv/a.vec"']).values()
    dict_values(['custext+:epsilon=1/vectors=a.vec', 'custext+:epsilon=1/vectors=a.vec (2)'])
    """
    found: dict[str, str] = {}
    for text in dict.fromkeys(protections):
        short = re.sub(r'=((?:"[^"]*"|[^"/+])*)', lambda value: f"={_last(value[1])}", text)
        same = sum(other == short or other.startswith(f"{short} (") for other in found.values())
        found[text] = f"{short} ({same + 1})" if same else short
    return found


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.replace('"', "").rstrip("/\\"))[-1]


def opened(part: str, keys: Collection[str] = ()) -> str | None:
    """One part of a protection with the value of its figure left out, as ``rasura calibrate`` takes it:
    ``dp-sgd/clip=0.5`` of ``dp-sgd:0.1/clip=0.5``. ``keys``: the options that can be that figure; without any, it is the
    value after the colon. None where ``part`` gives no such value.

    >>> opened("sealing:param=0.1/scheme=bfv", ("grad", "param"))
    'sealing:param/scheme=bfv'
    """
    head, *rest = part.strip().split("/")
    name, _, value = head.partition(":")
    if not keys:
        return "/".join([name, *rest]) if value else None
    found = [value, *rest]
    left = [o.partition("=")[0] if "=" in o and o.partition("=")[0] in keys else o for o in found]
    return None if left == found else f"{name}:{'/'.join(left)}"


def options(name: str, text: str, usual: Mapping[str, Any]) -> dict[str, Any]:
    """The values in ``text``, each with the type of its default in ``usual``. Where that type is text, ``none`` means None.
    A slash within double quotes separates nothing: ``vectors="/data/glove.txt"``.

    Raises ``InputError`` for options that the protection ``name`` does not have, and for invalid values.
    """
    out: dict[str, Any] = {}
    for part in filter(None, _split(name, text)):
        key, _, value = part.partition("=")
        if key not in usual:
            raise InputError(f"{name} has no option {key!r}; known: {', '.join(usual)}")
        out[key] = _value(name, key, value, usual[key])
    return out


def _split(name: str, text: str) -> list[str]:
    """``text`` at its slashes, but for those within double quotes, which are left out."""
    pieces = text.split('"')
    if len(pieces) % 2 == 0:
        raise InputError(f"{name}: one double quote is missing in {text}")
    out = [""]
    for number, piece in enumerate(pieces):
        first, *rest = [piece] if number % 2 else piece.split("/")
        out[-1] += first
        out += rest
    return out


def _value(name: str, key: str, value: str, usual: Any) -> Any:
    try:
        if isinstance(usual, bool):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(usual, int | float):
            return type(usual)(value)
    except (KeyError, ValueError):
        between = "; '/' stands between two settings" if "=" in value else ""
        raise InputError(f"{name}: {key} is {value!r}; expected a value like {str(usual).lower()}{between}") from None
    return None if value == "none" else value


def known(kind: str, name: str, names: Iterable[str]) -> str:
    """``name`` if it is one of ``names``; otherwise raises ``InputError`` with the nearest ones."""
    every = list(names)
    if name in every:
        return name
    near = difflib.get_close_matches(name, every, 3, 0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(every)}"
    raise InputError(f"unknown {kind} {name!r}; {hint}")
