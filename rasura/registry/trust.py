"""What an attack is shown, and what is believed of its guess."""

from __future__ import annotations

from dataclasses import replace

from rasura.attacks.shared.open_ends import open_ends
from rasura.attacks.shared.verify import prove, verified
from rasura.core.interfaces import Attack
from rasura.core.values import Observation, Reconstruction
from rasura.registry.collect import ours


def declared(attack: Attack[Reconstruction], seen: Observation) -> Observation:
    """What ``attack`` is shown of ``seen``: of one that is not Rasura's, the grants alone that it declares. What it was told
    without a word would count as read from the update."""
    if ours(type(attack)):
        return seen
    known = attack.needs | attack.uses
    return replace(seen, granted={grant: value for grant, value in seen.granted.items() if grant in known})


def trusted(guess: Reconstruction, seen: Observation, attack: object) -> Reconstruction:
    """``guess``; of an ``attack`` that is not Rasura's, ``verified`` only where the update proves it here, else ``matched``.

    Anybody can build a ``Proof``, and a verdict rests on it. A portfolio is Rasura's only if all of its members are. Where
    all that is seen of the update is zero, nothing supports a guess, ours or not: any text explains such an update.
    """
    if not any(bool(gradient.any()) for gradient in seen.gradients.values()):
        return guess if guess.confidence == "none" else replace(guess, confidence="none", proof=None)
    believed = all(map(ours, (type(attack), *getattr(attack, "attacks", ()))))
    if believed or guess.confidence not in ("verified", "span"):
        return guess
    proof = prove(seen, guess.tokens) if guess.confidence == "verified" and guess.images is None else None
    return replace(guess, confidence="matched", proof=None) if proof is None else verified(proof, guess.details)


def with_open_ends(guess: Reconstruction, seen: Observation, end: int | None) -> Reconstruction:
    """``guess``, whose details say where its texts may begin earlier or go on (``open_ends``). ``end``: the tokenizer's
    token for the end of a text."""
    return replace(guess, details={**guess.details, **open_ends(seen, guess, end)})
