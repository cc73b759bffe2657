"""The laws that every protection of an update keeps."""

from __future__ import annotations

import json

import torch
from torch import nn

from rasura.core.errors import NotSent
from rasura.core.interfaces import Defense
from rasura.core.specs import DefenseSpec
from rasura.core.values import Message, Task
from rasura.defenses.compose import chain, none
from rasura.testing.settings import overlaid, send
from rasura.testing.tiny import FAMILIES, batch_for, tiny

SETTINGS: tuple[tuple[str, Task], ...] = (
    *((family, "classification") for family in FAMILIES), ("gpt2", "causal"), ("llama", "causal"),
)  # fmt: skip
"""Model families and tasks that a protection is tried on."""


def check_defense(spec: DefenseSpec) -> None:
    """Hold ``spec`` to every law, in every setting. Raises ``AssertionError`` for the first that it breaks."""
    its_mechanism_is_public_and_plain(spec)
    for family, task in SETTINGS:
        leaves_model_and_batch_as_they_were(spec, family, task)
        sends_a_message_that_is_well_formed(spec, family, task)
        if spec.waits:
            sends_nothing_before_its_time(spec, family, task)
        elif spec.name != "none":
            changes_what_is_sent(spec, family, task)
        if spec.neutral is not None:
            equals_autograd(chain(spec.neutral()), family, task)


def snapshot(model: nn.Module) -> list[object]:
    """What a step must leave as it was: modes, dropout rates, which parameters train, and their values."""
    modules = [(m.training, getattr(m, "p", None), m.__dict__.get("attention_dropout")) for m in model.modules()]
    parameters = [(n, p.requires_grad, p.grad is None, p.detach().clone()) for n, p in model.named_parameters()]
    return [*modules, *((n, r, g, float(p.double().sum())) for n, r, g, p in parameters)]


def differs(one: Message, other: Message) -> bool:
    """Whether a receiver can tell the messages apart by more than rounding."""
    if set(one.gradients) != set(other.gradients) or set(one.visible) != set(other.visible):
        return True
    pairs = [(g, other.gradients[n]) for n, g in one.gradients.items()]
    return any(float((a - b).norm()) > 1e-4 * float(b.norm()) for a, b in pairs)


def its_mechanism_is_public_and_plain(spec: DefenseSpec) -> None:
    """It names the defense as users write it, and holds plain figures: a tensor could smuggle a secret out."""
    for part in overlaid(spec):
        assert part.mechanism.name == spec.name and part.mechanism.stage is part.stage
        for value in part.mechanism.parameters.values():
            assert type(value) in (float, int, str, bool, type(None))
        assert json.loads(json.dumps(dict(part.mechanism.parameters))) == dict(part.mechanism.parameters)


def leaves_model_and_batch_as_they_were(spec: DefenseSpec, family: str, task: Task) -> None:
    """A step under it leaves model, batch and torch's generator unchanged, and is repeatable with its seed."""
    defense = overlaid(spec)
    model = tiny(family, task)
    before, state = snapshot(model), torch.get_rng_state()
    first = send(family, task, defense, model)
    assert snapshot(model) == before and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.text_batch.input_ids, batch_for(task).input_ids)
    again = send(family, task, defense, model)
    for key, gradient in first.message.gradients.items():
        assert torch.equal(gradient, again.message.gradients[key])


def sends_a_message_that_is_well_formed(spec: DefenseSpec, family: str, task: Task) -> None:
    """Entries are finite and have the parameters' shapes; what is hidden is zero."""
    model = tiny(family, task)
    message = send(family, task, overlaid(spec), model).message
    shapes = {n: p.shape for n, p in model.named_parameters()}
    assert message.gradients and message.kind == "fedsgd"
    for key, gradient in message.gradients.items():
        assert gradient.shape == shapes[key] and bool(torch.isfinite(gradient).all()) and not gradient.requires_grad
    for key, mask in message.visible.items():
        assert mask.dtype is torch.bool and mask.shape == shapes[key]
        assert not message.gradients[key][~mask].any()


def changes_what_is_sent(spec: DefenseSpec, family: str, task: Task) -> None:
    """At the setting of its ``example`` a receiver can tell its message from the plain one."""
    plain, again = (send(family, task, none()).message for _ in range(2))
    assert not differs(plain, again)
    assert differs(send(family, task, overlaid(spec)).message, plain)


def sends_nothing_before_its_time(spec: DefenseSpec, family: str, task: Task) -> None:
    """A defense that waits sends the plain message once enough is there, and nothing before."""
    from rasura.registry import parse_defense

    enough = send(family, task, overlaid(spec)).message
    assert not differs(enough, send(family, task, none()).message)
    try:
        send(family, task, parse_defense(f"{spec.name}:100", methods={spec.name: spec}))
    except NotSent as reason:
        assert "waits for 100" in str(reason)
    else:
        raise AssertionError(f"{spec.name}:100 sent an update of two short texts")


def equals_autograd(defense: Defense, family: str, task: Task) -> None:
    """A protection at a neutral setting sends the gradient of the mean loss, to 1e-6."""
    model = tiny(family, task)
    loss = model(**batch_for(task).inputs()).loss
    named = dict(model.named_parameters())
    expected = dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True)))
    sent = send(family, task, defense, model)
    assert abs(sent.loss - float(loss.detach())) <= 1e-6 * abs(float(loss.detach()))
    assert {n for n, g in expected.items() if g is not None} == set(sent.message.gradients)
    for key, gradient in sent.message.gradients.items():
        assert torch.allclose(gradient, expected[key], rtol=1e-6, atol=1e-6)
        assert sent.message.visible.get(key, torch.ones(1)).all()
