"""Weights by numbers of texts: whatever ``max_examples`` is, rounding them costs no more than what is documented."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from flower_setting import LocalGrid, app_of, flower
from rounds_setting import FIRST, averaged, keys, largest, model
from torch import Tensor

from rasura.defenses.homomorphic_keys import Context as Keys
from rasura.integrations.flower.agreement import agree
from rasura.integrations.flower.rounds import opened

__all__ = ["flower", "keys"]

pytestmark = pytest.mark.usefixtures("flower")

HIDDEN = ("sealing:all/by=bfv", "sealing:all/by=secagg")
HALF_STEP = FIRST / ((1 << 15) - 1) / 2
"""A client's largest rounding error, without weights."""


def one_round(
    defense: str, keys: Keys, max_examples: int, texts: dict[int, int], caplog: pytest.LogCaptureFixture
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """The model before a round and after it, and what the server said of weights."""
    from rasura.integrations.flower import strategy

    whose = (None, None) if "bfv" not in defense else (keys, keys.public())
    clients, server = (agree(defense, model(), one) for one in whose)
    made = strategy(server, first_scale=FIRST, max_examples=max_examples)
    caplog.clear()
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        made.start(grid=LocalGrid(texts, app_of(clients, examples=texts.__getitem__)), num_rounds=1)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    after = dict(opened(clients, made.collector.visible(), made.collector.aggregate).weights)
    return dict(server.start), after, list(dict.fromkeys(m for m in caplog.messages if "max_examples" in m))


def off(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.cat([(one[n].double() - other[n].double()).flatten() for n in one]).norm())


@pytest.mark.parametrize("defense", HIDDEN)
@pytest.mark.parametrize("max_examples", [10, 30, 1000, 20_000, 1_000_000])
def test_no_max_examples_rounds_the_training_away(
    defense: str, max_examples: int, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Four clients of ten texts. With a million, nothing was learned, and no line said so."""
    start, after, said = one_round(defense, keys, max_examples, dict.fromkeys(range(4), 10), caplog)
    expected = averaged(start, range(4))
    times = min(max_examples / 10, 16)
    assert largest(after, expected) <= times * HALF_STEP + 1e-6
    assert off(after, expected) < 0.02 * off(expected, start)
    if max_examples <= 30:
        assert said == []
        return
    assert said == [
        f"round 1: 4 of 4 clients trained on a 16th of max_examples = {max_examples} texts or fewer, and weigh a 16th; the "
        "mean of hidden entries has 16.0 times the rounding error of equal weights; set max_examples "
        "(max-examples in the app) nearer to the most texts that any client trains on"
    ]


@pytest.mark.parametrize("defense", ["none", *HIDDEN])
def test_a_client_weighs_by_its_texts_and_never_less_than_a_sixteenth(
    defense: str, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Under any defense alike, so that runs can be compared."""
    texts = {0: 1, 1: 32, 2: 64, 3: 900}
    start, after, said = one_round(defense, keys, 64, texts, caplog)
    expected = averaged(start, range(4), {0: 1 / 16, 1: 0.5, 2: 1.0, 3: 1.0})
    assert largest(after, expected) <= (0 if defense == "none" else 4 * HALF_STEP / 2.5) + 1e-6
    assert [line.partition(";")[0] for line in said] == [
        "round 1: 1 of 4 clients trained on a 16th of max_examples = 64 texts or fewer, and weigh a 16th"
    ]
    assert ("rounding" in said[0]) is (defense != "none")


def test_what_small_weights_cost_is_said_though_none_is_raised(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    texts: dict[str, Any] = {"texts": {0: 10, 1: 10, 2: 10}, "caplog": caplog}
    assert one_round(HIDDEN[0], keys, 40, **texts)[2] == []
    _, _, (said,) = one_round(HIDDEN[0], keys, 80, **texts)
    assert said.startswith("round 1: the mean of hidden entries has 8.0 times the rounding")


def test_small_weights_make_the_noise_of_the_mean_larger_and_that_is_said(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, (said,) = one_round(f"{HIDDEN[1]}/noise=1.0", keys, 1000, {0: 10, 1: 10, 2: 10}, caplog)
    assert "the mean of hidden entries has 16.0 times the noise of equal weights" in said
