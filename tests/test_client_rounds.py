"""A Flower client behind `protect_training`: its ledger and its canaries count all of its rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_setting import LocalGrid, flower
from private_setting import Linear
from torch.utils.data import DataLoader

import rasura
from rasura.accounting import epsilon
from rasura.core.errors import InputError
from rasura.core.rng import generator
from rasura.core.rounding import above
from rasura.integrations.flower.client_rounds import ASSUMES, begin_rounds, client_bound, next_round

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")

__all__ = ["flower"]

WIDTH, ROUNDS, SIGMA = 300, 4, 3.0


def protected(canaries: Any = None, defense: str = f"dp-sgd:{SIGMA}") -> tuple[Any, Any, Any]:
    """A new model, loader and ledger, planned for all rounds of two steps, as in each call of a Flower client."""
    rng = generator(0, "features")
    data: Any = [{"features": torch.randn(WIDTH, generator=rng), "labels": torch.tensor(k % 2)} for k in range(40)]
    model: Any = Linear(WIDTH)
    model, _, loader, ledger = rasura.protect_training(
        model, None, DataLoader(data, batch_size=20), defense, epochs=ROUNDS, delta=1e-5, canaries=canaries
    )
    return model, loader, ledger


def one_round(path: Path, canaries: Any = None, **options: Any) -> Any:
    model, loader, ledger = protected(canaries, **options)
    with next_round(path, ledger, canaries):
        for batch in loader:
            model(**batch).loss.backward()
    return ledger


def test_all_rounds_are_counted_and_seen(tmp_path: Path) -> None:
    begin_rounds(tmp_path / "rounds.json")
    coins = None
    for number in range(1, ROUNDS + 1):
        canaries = rasura.GradientCanaries(200)
        ledger = one_round(tmp_path / "rounds.json", canaries)
        assert ledger.releases == canaries.releases == 2 * number
        assert coins is None or canaries.included.tolist() == coins
        coins = canaries.included.tolist()
    assert ledger.epsilon == pytest.approx(epsilon(SIGMA, 0.5, 2 * ROUNDS, 1e-5))
    said = client_bound(ledger, canaries)
    assert f"Stated: {above(ledger.epsilon)}" in said and said.endswith(ASSUMES) and "refuted" not in said
    with pytest.raises(InputError, match="all 8 planned releases"):
        one_round(tmp_path / "rounds.json", rasura.GradientCanaries(200))


def test_a_round_that_fails_is_counted(tmp_path: Path) -> None:
    """Its releases may have left the client."""
    path = tmp_path / "rounds.json"
    begin_rounds(path)
    model, loader, ledger = protected()
    with pytest.raises(RuntimeError), next_round(path, ledger):
        model(**next(iter(loader))).loss.backward()
        raise RuntimeError("out of memory")
    assert one_round(path).releases == 3
    assert json.loads(path.read_text())["rounds"] == 2 and path.stat().st_mode & 0o077 == 0


def test_an_unknown_past_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    with pytest.raises(InputError, match="not known what this client released in earlier rounds"):
        one_round(path)
    begin_rounds(path)
    with pytest.raises(InputError, match="already exists"):
        begin_rounds(path)
    with pytest.raises(InputError, match="there is none"):
        one_round(path, defense="gaussian:0.1")
    one_round(path)
    with pytest.raises(InputError, match="1 rounds were without them"):
        one_round(path, rasura.GradientCanaries(50))
    good = json.loads(path.read_text())
    damaged: list[Any] = [
        {**good, "rounds": 0}, {**good, "rounds": True}, {**good, "version": 2}, {**good, "ledger": None}, [],
        {**good, "more": 1}, {**good, "ledger": {**good["ledger"], "examples": 39}}, {**good, "ledger": {}},
    ]  # fmt: skip
    for broken in damaged:
        path.write_text(json.dumps(broken))
        with pytest.raises(InputError):
            one_round(path)
    path.write_text("{")
    with pytest.raises(InputError, match="holds no state of a client's rounds"):
        one_round(path)
    other = tmp_path / "with.json"
    begin_rounds(other)
    one_round(other, rasura.GradientCanaries(50))
    with pytest.raises(InputError, match="1 rounds were with them"):
        one_round(other)


def test_releases_outside_of_the_block_are_found(tmp_path: Path) -> None:
    """A step before the block would not be among what is loaded."""
    path = tmp_path / "rounds.json"
    begin_rounds(path)
    one_round(path)
    model, loader, ledger = protected()
    model(**next(iter(loader))).loss.backward()
    with pytest.raises(InputError, match="already counted 1 releases"), next_round(path, ledger):
        pass
    assert json.loads(path.read_text())["rounds"] == 1


OTHER = """
import sys
from rasura.accounting import Draw, Ledger, Run
from rasura.core.mechanisms import DpSgd
from rasura.integrations.flower.client_rounds import next_round
ledger = Ledger([DpSgd(3.0)], Run(40, 20, 4, 1e-5))
with next_round(sys.argv[1], ledger):
    ledger.made(Draw("poisson", 0.5), [602], secret=True)
    print("inside", flush=True)
    sys.stdin.readline()
"""
"""A client's round in a process of its own, which ends once it is told a line."""


@pytest.mark.slow
def test_two_processes_are_never_in_a_round_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    (tmp_path / "other-name.json").symlink_to(path)
    begin_rounds(path)
    for killed in (False, True):
        command = [sys.executable, "-c", OTHER, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdin is not None and other.stdout is not None
            assert other.stdout.readline() == "inside\n"
            for name in (path, tmp_path / "other-name.json"):
                with pytest.raises(InputError, match="another process is in a round of this client"):
                    one_round(name)
            if killed:
                other.kill()
            else:
                other.communicate("end\n")
        if killed:  # what it released is in no file
            with pytest.raises(InputError, match="or one was killed in a round"):
                one_round(path)
            (tmp_path / "rounds.json.running").unlink()
        else:
            assert other.returncode == 0
            assert one_round(tmp_path / "other-name.json").releases == 3
    assert one_round(path).releases == 5 and json.loads(path.read_text())["rounds"] == 3
    assert not (tmp_path / "rounds.json.running").exists() and (tmp_path / "other-name.json").is_symlink()


def test_a_state_that_cannot_be_written_ends_the_rounds(tmp_path: Path) -> None:
    """Its releases are in no file, so no other round may follow."""
    path = tmp_path / "rounds.json"
    begin_rounds(path)
    model, loader, ledger = protected()
    with pytest.raises(InputError, match="cannot be written"), next_round(path, ledger):
        model(**next(iter(loader))).loss.backward()
        path.unlink()
        path.mkdir()
    path.rmdir()
    begin_rounds(path)
    with pytest.raises(InputError, match="one was killed in a round"):
        one_round(path)


@pytest.mark.usefixtures("flower")
def test_clients_of_a_flower_run_know_what_they_spent(tmp_path: Path) -> None:
    from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from rasura.integrations.flower import ClientSetup, agree, protection_mod, strategy

    torch.manual_seed(0)
    start = Linear(WIDTH)
    agreement = agree("none", start)
    app = ClientApp(mods=[protection_mod(lambda context: ClientSetup(agreement))])
    said: dict[int, list[str]] = {}

    @app.train()  # type: ignore[untyped-decorator]  # of Flower
    def train(message: Any, context: Any) -> Any:
        node = message.metadata.dst_node_id
        canaries = rasura.GradientCanaries(100)
        model, loader, ledger = protected(canaries)
        model.load_state_dict({n: torch.tensor(a.numpy()) for n, a in message.content["arrays"].items()})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with next_round(tmp_path / f"{node}.json", ledger, canaries):
            for batch in loader:
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
        said.setdefault(node, []).append(client_bound(ledger, canaries))
        arrays = ArrayRecord({n: Array(p.detach().numpy()) for n, p in model.named_parameters()})
        told = MetricRecord({"num-examples": 40, "epsilon": ledger.epsilon})
        return Message(RecordDict({"arrays": arrays, "metrics": told}), reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator]  # of Flower
    def evaluate(message: Any, context: Any) -> Any:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 40})}), reply_to=message)

    for node in range(3):
        begin_rounds(tmp_path / f"{node}.json")
    grid = LocalGrid(range(3), lambda node, message: app(message, Context(1, node, {}, RecordDict(), {})))
    result = strategy(agreement).start(grid=grid, num_rounds=2)
    assert {node: len(told) for node, told in said.items()} == {0: 2, 1: 2, 2: 2}
    spent = result.train_metrics_clientapp[2]["epsilon"]
    assert spent == pytest.approx(epsilon(SIGMA, 0.5, 4, 1e-5))
    assert all(f"Stated: {above(spent)}" in told[-1] for told in said.values())
