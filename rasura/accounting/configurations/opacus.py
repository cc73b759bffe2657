"""Opacus' ``make_private`` and ``make_private_with_epsilon`` (1.6 was read): DP-SGD for single examples."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rasura.accounting.configurations.dp_sgd import accounted, loader, sought, steps_made
from rasura.accounting.configurations.drafts import Draft
from rasura.accounting.configurations.facts import Stated, Unknown, Unread, positive

OPACUS = (
    "module", "optimizer", "criterion", "data_loader", "noise_multiplier", "max_grad_norm", "batch_first",
    "loss_reduction", "poisson_sampling", "clipping", "noise_generator", "grad_sample_mode", "wrap_model", "rand_on_empty",
    "epochs",
)  # fmt: skip
OPACUS_TARGET = (*OPACUS, "target_epsilon", "target_delta")
ACCOUNTANTS = ("prv", "rdp")
"""The accountants of Opacus that never choose less noise than is needed, apart from rounding."""

UNDERSTOOD: Mapping[str, tuple[object, ...]] = {
    "batch_first": (True,), "loss_reduction": ("mean", "sum"), "grad_sample_mode": ("hooks",), "wrap_model": (True,),
    "rand_on_empty": (False,), "criterion": (None,),
}  # fmt: skip
"""Arguments that change what is clipped or drawn, with the values that are understood; the default is the first."""


def opacus(draft: Draft) -> None:
    """``PrivacyEngine.make_private`` (Opacus 1.6): noise of deviation ``noise_multiplier * max_grad_norm`` on the sum of
    clipped gradients, Poisson sampling at 1 / len(loader), and as many steps in an epoch."""
    _opacus_clip(draft)
    multiplier = draft.noise("noise_multiplier")
    rate, in_epoch = loader(draft, by_length=_opacus_draws(draft))
    accounted(draft, multiplier, steps_made(draft, rate, in_epoch, _opacus_poisson(draft)), draft.delta("example"))


def opacus_target(draft: Draft) -> None:
    """``PrivacyEngine.make_private_with_epsilon``: the multiplier that meets ``target_epsilon`` after ``epochs``.

    Of the training that it was chosen for, epsilon is the target: Opacus' accountant vouches for it, and may use all of it.
    Elsewhere the least such noise counts, by PLD. RDP chooses more noise; an approximation such as GDP may choose less, and
    then nothing is said. It is chosen at ``target_delta``; a statement at another delta is compared with its epsilon there.
    """
    _opacus_clip(draft)
    for engine in draft.others:
        if engine.name == "PrivacyEngine" and Draft(engine, draft.facts, None).value("accountant", "prv") not in ACCOUNTANTS:
            given = engine.arguments["accountant"]
            by = given.text if isinstance(given, Unread) else repr(given)
            raise Unknown(f"the noise is chosen by the accountant {by}; prv and rdp are understood here")
    target, epochs = draft.noise("target_epsilon"), draft.count("epochs")
    chosen_at = draft.number("target_delta")
    delta = draft.delta("example", chosen_at)
    if draft.stated is None:
        draft.stated = Stated(target, delta)
    searched, in_epoch = loader(draft, by_length=True)  # at which Opacus searches the noise
    planned = epochs * in_epoch
    multiplier = sought(target, searched, planned, chosen_at)
    rate, _ = loader(draft, by_length=_opacus_draws(draft))
    steps = steps_made(draft, rate, in_epoch, _opacus_poisson(draft))
    if steps.made > planned:
        draft.hazard("steps", f"the noise is for {epochs} epochs of {in_epoch} steps, but {steps.made} steps are made")
    as_planned = steps.poisson and rate == searched and steps.made <= planned and delta == chosen_at
    accounted(draft, multiplier, steps, delta, known=target if as_planned else math.inf)


def _opacus_draws(draft: Draft) -> bool:
    return draft.value("poisson_sampling", True) is True


def _opacus_poisson(draft: Draft) -> bool:
    if _opacus_draws(draft):
        return True
    if draft.call.extra.get("program") and draft.facts.sampling == "poisson":
        raise Unknown("sampling poisson is given, but the program switches Poisson sampling off")
    return draft.facts.sampling == "poisson"


def _opacus_clip(draft: Draft) -> None:
    for name, values in UNDERSTOOD.items():
        if (value := draft.value(name, values[0])) not in values:
            raise Unknown(f"{name} of {draft.call.name} is {value!r}, which is not understood here")
    if draft.call.extra.get("program") and draft.value("loss_reduction", "mean") != "mean":
        raise Unknown("loss_reduction is not mean, which is that of the losses that are understood in a program")
    norms = draft.value("max_grad_norm")
    mode = draft.value("clipping", "flat")
    if isinstance(norms, list) and mode == "per_layer":
        # The noise fits the norm of all clips together (Opacus ``DPPerLayerOptimizer``).
        if not norms or not all(positive(one) for one in norms):
            draft.hazard("no-clip", f"max_grad_norm is {norms}: a layer is not clipped")
            raise Unknown("without clipping there is no guarantee")
    elif mode == "flat":
        draft.clip("max_grad_norm")
    else:
        raise Unknown(f"clipping is {mode!r} with max_grad_norm {norms!r}; flat, and per_layer with a list, are known")
    draft.secret_noise("noise_generator")
    engines = [one for one in draft.others if one.name == "PrivacyEngine"]
    if not engines or any(one.arguments.get("secure_mode") is not True for one in engines):
        draft.notes.append("without secure_mode the noise is from PyTorch's generator, which is not secret by design")
