"""Where a text of a classifier may go on that a guess names: what stands there leaves nothing in the update."""

from __future__ import annotations

from rasura.attacks.shared.comparing import apart
from rasura.attacks.shared.decoys import lengths_known, longer, with_one_more
from rasura.attacks.shared.twins import Texts
from rasura.attacks.shared.verify import VERIFIED, check
from rasura.core.values import UNKNOWN, Observation, Parameter, Reconstruction


def open_ends(seen: Observation, guess: Reconstruction, end: int | None) -> dict[str, Parameter]:
    """What the update leaves open at the ends of the texts of ``guess``, as entries of its details.

    ``begins_earlier``, ``ends_later``: why a guess with this very update is not verified. ``ends_in_padding``: the token
    ``end``, of which the tokenizer makes padding too, may follow any text. Empty where the whole texts are not known.
    """
    tokens: Texts = guess.tokens
    known = bool(tokens) and all(text and UNKNOWN not in text for text in tokens)
    pads = end is not None and end == seen.vocabulary.pad_id
    if seen.task != "classification" or not guess.ordered or not known or lengths_known(seen):
        return {}
    if guess.confidence == "verified" and not pads:
        return {}
    error, _ = check(seen, tokens)
    if not error < VERIFIED:
        return {}
    more: dict[str, Texts] = {}
    if guess.confidence != "verified":
        names = {"begins": "begins_earlier", "ends": "ends_later"}
        more = {names[side]: decoy for side, (decoy, _) in longer(seen, tokens, None).items()}
    if end is not None and pads and tokens[0][-1] != end:
        more["ends_in_padding"] = with_one_more(tokens, None, 0, len(tokens[0]), end)[0]
    return {name: True for name, decoy in more.items() if not apart(error, check(seen, decoy)[0])}
