"""Federated rounds under secure aggregation: the sums of plain FedAvg, clients that vanish at every stage, and refusals."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from flower_setting import app_of, flower, grid_of, of_stage
from rounds_setting import FIRST, averaged, largest, model, trained
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.integrations.flower.agreement import Agreement, agree
from rasura.integrations.flower.collector import RoundFailed

__all__ = ["flower"]

pytestmark = pytest.mark.usefixtures("flower")

ALL = "sealing:all/by=secagg"
PART = "sealing:param=0.3/by=secagg"

STEP = FIRST / ((1 << 15) - 1) / 2
"""A client's largest rounding error; the mean's is no larger."""


def agreed(defense: str = ALL, **given: Any) -> Agreement:
    return agree(defense, model(), **given)


def weights(made: Any) -> dict[str, Tensor]:
    return dict(made.collector.clear)


@pytest.mark.parametrize("defense", [ALL, PART])
def test_flower_sums_securely_what_plain_fedavg_sums(defense: str) -> None:
    from rasura.integrations.flower import strategy

    made = strategy(agreed(defense), first_scale=FIRST)
    result = made.start(grid=grid_of(4, app_of(agreed(defense))), num_rounds=2)
    expected = dict(made.agreement.start)
    for _ in range(2):
        expected = {n: w.float() for n, w in averaged(expected, range(4)).items()}
    assert largest(weights(made), expected) <= 2 * STEP + 1e-6
    assert largest(weights(made), dict(made.agreement.start)) > 100 * STEP
    told = result.train_metrics_clientapp[2]
    assert told["rasura-beyond"] == 0
    entries = sum(t.numel() for t in made.agreement.start.values())
    if defense == ALL:  # 18 bits a value, and headers
        assert 18 / 8 * entries < told["rasura-bytes"] < 18 / 8 * entries + 12_000
    # The server holds the model: clients that evaluate are sent all of it.
    assert set(made.collector.visible()) == set(made.agreement.start)


def test_clients_weigh_by_their_texts() -> None:
    from rasura.integrations.flower import strategy

    made = strategy(agreed(), first_scale=FIRST, max_examples=4)
    app = app_of(agreed(), examples=lambda node: node + 1)
    made.start(grid=grid_of(4, app), num_rounds=1)
    shares = {k: (k + 1) / 4 for k in range(4)}
    assert largest(weights(made), averaged(dict(made.agreement.start), range(4), shares)) <= 4 * STEP + 1e-6


@pytest.mark.parametrize("stage", ["keys", "shares", "train", "revealed"])
def test_rounds_finish_with_two_of_eight_lost_at_any_stage(stage: str) -> None:
    from rasura.integrations.flower import strategy

    made = strategy(agreed(), first_scale=FIRST)
    grid = grid_of(8, app_of(agreed()), {(1, stage): {2, 5}})
    made.start(grid=grid, num_rounds=2)
    left = [k for k in range(8) if k not in (2, 5)]
    first = range(8) if stage == "revealed" else left  # both had sent their updates
    expected = {n: w.float() for n, w in averaged(dict(made.agreement.start), first).items()}
    assert largest(weights(made), averaged(expected, left)) <= 2 * STEP + 1e-6
    assert [f["counted"] for f in made.figures.values()] == [len(first), 6]


def test_more_lost_than_a_third_end_the_round_and_nothing_is_opened() -> None:
    from rasura.integrations.flower import strategy

    made = strategy(agreed(), first_scale=FIRST)
    with pytest.raises(RoundFailed, match=r"round 1: client . left 5 valid shares of the 6"):
        made.start(grid=grid_of(8, app_of(agreed()), {(1, "revealed"): {0, 1, 2}}), num_rounds=1)
    assert largest(weights(made), dict(made.agreement.start)) == 0


def test_a_model_crafted_for_one_client_is_refused_before_it_is_trained() -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord

    from rasura.integrations.flower import strategy

    def crafted(node: int, message: Any) -> None:
        if node == 3 and of_stage(message) == "train":
            arrays = {n: Array(a.numpy() + 1) for n, a in message.content["arrays"].items()}
            message.content["arrays"] = ArrayRecord(arrays)

    def told_as_well(node: int, message: Any) -> None:
        """The digest, too, is another one, from the first stage on."""
        if node == 3:
            message.content["rasura"] = ConfigRecord({**message.content["rasura"], "model": b"\1" * 32})

    for change, why in ((crafted, "the server sent another model"), (told_as_well, "another model")):
        seen: list[int] = []
        made = strategy(agreed(), first_scale=FIRST)
        grid = grid_of(4, app_of(agreed(), trains=seen.append))
        grid.change = change
        made.start(grid=grid, num_rounds=1)
        assert sorted(seen) == [0, 1, 2]
        assert largest(weights(made), averaged(dict(made.agreement.start), range(3))) <= STEP + 1e-6
        assert made.figures[1]["counted"] == 3, why


def test_bad_answers_at_any_stage_leave_the_others_theirs() -> None:
    from flwr.app import ConfigRecord

    from rasura.integrations.flower import strategy

    for stage in ("keys", "shares", "train", "revealed"):
        for bad in (bytes(1 << 20) if stage == "train" else b"garbage",):
            asked: dict[int, str] = {}

            def note(node: int, message: Any, asked: dict[int, str] = asked) -> None:
                asked[node] = of_stage(message)

            def tamper(
                node: int, number: int, reply: Any, at: str = stage, asked: dict[int, str] = asked, bad: bytes = bad
            ) -> Any:
                if node == 1 and asked.get(node) == at and "rasura" in reply.content:
                    reply.content["rasura"] = ConfigRecord({"message": bad})
                return reply

            made = strategy(agreed(), first_scale=FIRST)
            grid = grid_of(4, app_of(agreed(), tamper))
            grid.change = note
            made.start(grid=grid, num_rounds=1)
            counted = range(4) if stage == "revealed" else (0, 2, 3)
            assert largest(weights(made), averaged(dict(made.agreement.start), counted)) <= STEP + 1e-6


@pytest.mark.parametrize("allow_few_clients", [False, True])
def test_a_secure_sum_of_one_client_is_refused_before_any_round(
    allow_few_clients: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It was agreed on, and every round of it failed."""
    with pytest.raises(InputError, match=r"min_clients is 1: secure aggregation sums at least 2 clients"):
        agreed(min_clients=1, allow_few_clients=allow_few_clients)
    assert "can be opened" not in caplog.text
    assert agreed(min_clients=2, allow_few_clients=True).least == 2


def test_clients_open_no_sum_of_fewer_than_they_agreed_on() -> None:
    from rasura.integrations.flower import strategy

    made = strategy(agreed(min_clients=2, allow_few_clients=True), min_clients=2, first_scale=FIRST, allow_few_clients=True)
    # The clients' own agreement says three.
    with pytest.raises(RoundFailed, match="0 clients sent shares"):
        made.start(grid=grid_of(3, app_of(agreed())), num_rounds=1)
    with pytest.raises(InputError, match="a round of 2 clients"):
        agreed(min_clients=2)


def test_two_clients_are_told_that_each_has_the_others_update() -> None:
    """Masks of two clients hide their updates from the server alone."""
    from rasura.integrations.flower import strategy

    records: list[logging.LogRecord] = []
    keep = logging.Handler()
    keep.emit = records.append  # type: ignore[method-assign, assignment]
    asked: dict[str, Any] = {"min_clients": 2, "allow_few_clients": True}
    logging.getLogger("flwr").addHandler(keep)
    try:
        made = strategy(agreed(**asked), first_scale=FIRST, **asked)
        made.start(grid=grid_of(2, app_of(agreed(**asked))), num_rounds=1)
        strategy(agreed(), first_scale=FIRST).start(grid=grid_of(3, app_of(agreed())), num_rounds=1)
    finally:
        logging.getLogger("flwr").removeHandler(keep)
    start = dict(made.agreement.start)
    own, others = trained(0, start), trained(1, start)
    assert largest({n: 2 * w - own[n] for n, w in weights(made).items()}, others) <= 4 * STEP + 1e-6
    told = "a sum of 2 clients can be opened, and each can subtract its own update from it and obtain the other's"
    lines = [r.getMessage().partition(told)[::2] for r in records if "can be opened" in r.getMessage()]
    assert lines == [("min_clients = 2: ", "")] * 2 + [("round 1: ", "")] * 3, (
        "two clients and the server, and none of three"
    )


def test_what_cannot_be_is_told_in_one_line() -> None:
    from rasura.registry import parse_defense

    with pytest.raises(InputError, match="No library with threshold keys installs on Linux, macOS and Windows"):
        agreed("sealing:all/by=threshold")
    with pytest.raises(InputError, match="by is 'x'; expected secagg or bfv"):
        agreed("sealing:all/by=x")
    with pytest.raises(InputError, match="by and scheme say the same"):
        agreed("sealing:all/by=bfv/scheme=bfv")
    with pytest.raises(InputError, match="sealing needs keys"):
        agreed("sealing:all/by=bfv")
    with pytest.raises(InputError, match="depends on a client's own texts"):
        agreed("sealing:grad=0.1/by=secagg")
    (part,) = parse_defense("sealing:all/by=secagg")
    assert json.dumps(dict(part.mechanism.parameters))
    with pytest.raises(InputError, match="does not tell what can be read"):
        part.init((torch.nn.Linear(2, 2), {}))


def test_a_client_without_the_earlier_stages_or_of_another_protection_answers_with_an_error() -> None:
    from rasura.integrations.flower import strategy

    errors: list[str] = []

    def heard(node: int, number: int, reply: Any) -> Any:
        errors.extend([reply.error.reason] if reply.has_error() else [])
        return reply

    plain = agree("none", model())
    mixed = {k: app_of(agreed() if k < 3 else plain, heard) for k in range(4)}
    made = strategy(agreed(), first_scale=FIRST)
    made.start(grid=grid_of(4, lambda n, m: mixed[n](n, m)), num_rounds=1)
    assert made.figures[1]["counted"] == 3
    assert errors[0] == "rasura: the server sums securely, but the defense of this client does not"
    with pytest.raises(RoundFailed):
        strategy(plain, first_scale=FIRST).start(grid=grid_of(3, app_of(agreed(), heard)), num_rounds=1)
    assert errors[-1] == "rasura: the agreement is for secure aggregation, but the server began none"


def test_noise_in_the_sum_is_that_of_all_clients_and_is_counted() -> None:
    from rasura.integrations.flower import strategy

    noisy = "sealing:all/by=secagg/noise=0.5/clip=0.01"
    made = strategy(agreed(noisy), first_scale=FIRST)
    made.start(grid=grid_of(8, app_of(agreed(noisy)), {(1, "train"): {2, 5}}), num_rounds=1)
    # Four of the six who must stay add noise that no third of colluding clients knows: theirs alone is half the clip.
    sigma = 0.5 * 0.01 * (6 / 4) ** 0.5 / 6
    before, plain = dict(made.agreement.start), averaged(dict(made.agreement.start), [0, 1, 3, 4, 6, 7])
    found = torch.cat([(weights(made)[n] - before[n]).double().flatten() for n in before])
    assert abs(float(found.std()) / sigma - 1) < 0.1  # the clipped updates are far smaller
    assert largest(weights(made), plain) > sigma
    ((step, left),) = made.collector.ledger.rounds
    assert left == 4 and step == -(-0.5 * (1 << 16) // 2)
    assert made.figures[1]["rho"] == pytest.approx(1 / (2 * 0.25), rel=1e-3)
    assert made.collector.ledger.statement(1e-5).startswith("(")
    with pytest.raises(InputError, match="clear entries have none"):
        agreed("sealing:param=0.1/by=secagg/noise=1.0")
    with pytest.raises(InputError, match="needs sealing:all/by=secagg"):
        agreed("sealing:all/by=bfv/noise=1.0")
    with pytest.raises(InputError, match="expected at least 0"):
        agreed("sealing:all/by=secagg/noise=nan")


def test_a_clipped_update_is_sent_whole_where_noise_is_small() -> None:
    from rasura.integrations.flower import strategy

    noisy = "sealing:all/by=secagg/noise=0.0001/clip=100.0"
    made = strategy(agreed(noisy), first_scale=FIRST)
    made.start(grid=grid_of(4, app_of(agreed(noisy))), num_rounds=1)
    assert largest(weights(made), averaged(dict(made.agreement.start), range(4))) < 0.05


@pytest.mark.parametrize("defense", [f"{ALL}/noise=1.0/clip=0.001", "none"])
def test_entries_beyond_the_scale_are_no_figure_where_there_is_no_scale(defense: str) -> None:
    """With noise the whole update is clipped by its norm, which nobody reports: the noise would not cover it."""
    from rasura.integrations.flower import strategy

    result = strategy(agreed(defense), first_scale=FIRST).start(grid=grid_of(3, app_of(agreed(defense))), num_rounds=1)
    assert set(result.train_metrics_clientapp[1]) == {"rasura-bytes", "rasura-cpu-seconds"}
