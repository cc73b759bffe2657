"""An earlier training of a model, as its folder or adapter shows it: a new ledger does not count what that one released."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from rasura.accounting.ledger import parsed, releases_in
from rasura.core.errors import InputError
from rasura.runs.membership_rows import trained_under

LEDGER = "rasura_ledger.json"
"""The file of a ledger in a folder that ``PrivateTrainer`` saved."""

COUNTS = "for a text that was in that training too, what it spent or gave away counts beside this guarantee"


def begins_on(model: nn.Module) -> str:
    """What to say beside the guarantee of a training of ``model``: of an earlier one that the folder shows from which it was
    loaded, and of an adapter that may have been trained, since nothing says from which folder an adapter was loaded."""
    folder = getattr(getattr(model, "config", None), "_name_or_path", None) or ""
    adapter = (
        "the model's adapter may have been trained before, since its weights are not those of a new LoRA adapter, whose "
        f"product is zero: {COUNTS}"
    )
    return ". ".join([*filter(None, [trained_before(folder)]), *([] if _new_adapters(model) else [adapter])])


def _new_adapters(model: nn.Module) -> bool:
    """Whether no adapter of ``model`` can have been trained before. Only of LoRA this can be told: it begins at zero."""
    held = [found for m in model.modules() if isinstance(found := getattr(m, "peft_config", None), Mapping)]
    if any(getattr(one, "peft_type", None) != "LORA" for found in held for one in found.values()):
        return False
    return not any(p.any() for n, p in model.named_parameters() if ".lora_B." in n or ".lora_embedding_A." in n)


def trained_before(model: str) -> str:
    """What to say beside the guarantee of a training that begins from ``model``; empty where that is no folder, or shows no
    earlier training."""
    if not model or not Path(model).is_dir():
        return ""
    if (under := trained_under(model)) is not None:
        told = f"rasura train, under {under}"
    elif (Path(model) / LEDGER).exists():
        told = f"PrivateTrainer, {_spent(Path(model) / LEDGER)}"
    else:
        return ""
    return f"{model} was itself trained by {told}: {COUNTS}"


def _spent(ledger: Path) -> str:
    try:
        state, _ = parsed(ledger)
        return f"under {' + '.join(map(str, state['defense']))} ({releases_in(ledger)} releases)"
    except (InputError, LookupError, TypeError):
        return "and its ledger cannot be read"
