"""What a defense asks of a training on one machine: that it can train there, and that there are enough texts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rasura.core.accumulation import counted, needed_tokens
from rasura.core.batches import Batch
from rasura.core.interfaces import Defense, InputError


def local(defense: Defense) -> Defense:
    """``defense``, if a single machine can train under it. Raises ``InputError`` for sealing, which would never be decrypted
    there."""
    if any(p.mechanism.name == "sealing" for p in defense):
        raise InputError(
            "sealing hides entries from a server that adds up what clients send. When one machine trains alone, "
            "these entries would be zeros and their weights would not learn. Leave sealing out here; for "
            "clients use rasura.integrations.flower"
        )
    return defense


def enough(defense: Defense, model: nn.Module, rows: Sequence[Batch]) -> int:
    """How many different tokens a step needs under ``defense``; 0 for any number. Raises ``InputError`` if ``rows`` have
    fewer."""
    needed = needed_tokens((p.mechanism for p in defense), model)
    if needed and (there := len(counted(rows))) < needed:
        raise InputError(
            f"the training texts hold {there} different tokens, but accumulate waits for {needed}, "
            "so no step would be taken; pass more texts"
        )
    return needed
