"""What stands beside a counted guarantee: what its figures count more than was made, and what they do not cover."""

from __future__ import annotations

from dataclasses import replace

from rasura.accounting.guarantees import Guarantee


def beside(found: Guarantee, missing: tuple[int, int], copies: tuple[int, int], earlier: str = "") -> Guarantee:
    """``found``, which says how many of the releases that count are not in the weights (``missing``: never made, and made
    later), of ``copies`` as ``of_copies`` does, and of an ``earlier`` training of the model what that sentence says."""
    if found.epsilon is None and found.otherwise is None:
        return found
    unmade, later = missing
    ended = f"{unmade} of these were not made. They count, since when the training ended may depend on the texts"
    chosen = (
        f"{later} of these are not in the weights: they were made after these weights, or after those from which the "
        "training was resumed. They count, since which weights were kept may depend on the texts"
    )
    gone = [*([ended] if unmade else []), *([chosen] if later else [])]
    more = [*gone, *of_copies(*copies, "at least "), *([earlier] if earlier else [])]
    return replace(found, warnings=(*found.warnings, *more))


def of_copies(texts: int, most: int, least: str = "") -> list[str]:
    """What to say of ``texts`` in several rows each, up to ``most``; nothing of none. ``least``: if there may be more."""
    says = (
        f"the guarantee is for one row, and {least}{texts} different training texts stand in several, one in {least}{most}. "
        "Such a text has up to as many times the epsilon as rows, at a delta that grows by far more. Remove the copies"
    )
    return [says] if texts else []
