"""What the attacks on row spaces say where they find nothing: the cause that is there, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from span_setting import TEXTS, seen_by_server

from rasura.attacks.updates.span import Span
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import block_spaces, visible_blocks
from rasura.attacks.updates.span.scan import Scan
from rasura.attacks.updates.span_matching import SpanMatching
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.values import Observation
from rasura.testing.tiny import CLS, WORDS, batch_of, tiny
from rasura.victims.models import parts

BARE = [CLS, *TEXTS[0][1:-1]]


def of_bert() -> Observation:
    return seen_by_server(tiny("bert", "classification"), batch_of(TEXTS[:1], "classification"), "classification")


def zeroed(seen: Observation, *some: str) -> Observation:
    """``seen`` with zeros for the gradients of parameters with one of ``some`` in their names."""
    found = {n: g * (not any(part in n for part in some)) for n, g in seen.gradients.items()}
    return replace(seen, message=replace(seen.message, gradients=found))


@pytest.mark.parametrize("method", [Span(), SpanMatching()])
def test_gradients_that_are_all_zero_are_said_to_be_and_no_cause_is_made_up(method: Span | SpanMatching) -> None:
    """A full difference holds zeros for frozen layers, and an adapter's first round for the side that sees the inputs."""
    with pytest.raises(NotApplicable, match="gradients are all zero") as said:
        method(zeroed(of_bert(), ".self."), rng=generator(0, "attack"), budget=Budget("quick"))
    assert "noise" not in str(said.value) and "tokens" not in str(said.value)


def test_blocks_whose_gradients_are_zero_do_not_stand_in_the_way_of_others() -> None:
    model = tiny("llama", "causal", blocks=4)
    seen = zeroed(seen_by_server(model, batch_of([BARE], "causal"), "causal"), *(b.module for b in parts(model).blocks[:3]))
    guess = Span()(seen, rng=generator(0, "attack"), budget=Budget("quick"))
    assert guess.tokens[0][:-1] == tuple(BARE[:-1]) and guess.details["blocks"] == "3"
    with pytest.raises(NotApplicable, match="block 0 is hidden or zero"):
        Span()(zeroed(of_bert(), "layer.0."), rng=generator(0, "attack"), budget=Budget("quick"))


def test_a_first_block_in_noise_is_not_said_to_be_hidden() -> None:
    clear = seen_by_server(tiny("bert", "classification", blocks=2), batch_of(TEXTS[:2], "classification"), "classification")
    noise = {
        n: torch.randn(g.shape, generator=generator(0)) if "layer.0.attention.self" in n else g
        for n, g in clear.gradients.items()
    }
    with pytest.raises(AttackFailed, match="block 0 shows no row space: rounding or noise hides it"):
        Span(adaptive=False)(
            replace(clear, message=replace(clear.message, gradients=noise)), rng=generator(0), budget=Budget("quick")
        )


@pytest.mark.parametrize(("rank", "why"), [(12, "rounding or noise"), (15, "about as many tokens as the layer has inputs")])
def test_only_a_row_space_near_the_width_is_said_to_be_full(rank: int, why: str) -> None:
    seen = seen_by_server(tiny("llama", "causal", hidden=16), batch_of([BARE], "causal"), "causal")
    basis = torch.linalg.qr(torch.randn(16, rank, generator=generator(1), dtype=torch.double)).Q
    vague = replace(block_spaces(seen, visible_blocks(seen))[0], basis=basis, noise=torch.ones(rank, dtype=torch.double))
    scan = Scan(vague, Inputs(seen.model), torch.arange(WORDS), 1)
    with pytest.raises(AttackFailed, match=why):
        Span()._plain(scan, 1, False, placed=False, several=False)
