"""Flower on an in-process grid, and the app that ``rasura new federated`` writes, by ``flwr run`` and over loopback."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from federated_setting import app_modules, folder, simulated
from flower_setting import LocalGrid, app_of, flower
from rounds_setting import DEFENSES, FIRST, averaged, keys, largest, model, sides

from rasura.core.interfaces import InputError
from rasura.core.wire import from_bytes
from rasura.data.fictional import fictional_notes
from rasura.defenses.homomorphic_keys import Context as Keys
from rasura.defenses.homomorphic_keys import make_keys
from rasura.integrations.flower.agreement import agree, read_scales
from rasura.integrations.flower.collector import RoundFailed
from rasura.integrations.flower.rounds import opened

__all__ = ["app_modules", "flower", "folder", "keys"]

STEPS = "local:batch=3/lr=5e-4"
"""At least two steps a round on what each client of these tests has."""


@pytest.mark.usefixtures("flower")
@pytest.mark.parametrize("defense", DEFENSES)
def test_flower_trains_as_its_own_fedavg_does(defense: str, keys: Keys) -> None:
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    from rasura.integrations.flower import strategy

    clients, server = sides(defense, keys)
    start = ArrayRecord({n: Array(t.numpy()) for n, t in clients.start.items()})
    plain = FedAvg(min_available_nodes=3).start(grid=LocalGrid(range(3), app_of(None)), initial_arrays=start, num_rounds=2)
    made = strategy(server, first_scale=FIRST)
    result = made.start(grid=LocalGrid(range(3), app_of(clients)), num_rounds=2)
    expected = {n: torch.tensor(a.numpy()) for n, a in plain.arrays.items()}
    found = opened(clients, made.collector.visible(), made.collector.aggregate).weights
    step = 1e-6
    if made.collector.aggregate:
        scales = read_scales(from_bytes(made.collector.aggregate).header["scales"], clients)
        step += 2 * max(scales.values()) / ((1 << 15) - 1)
    assert largest(dict(found), expected) <= step
    figures = result.train_metrics_clientapp[2]
    assert figures["rasura-bytes"] > 1000
    assert figures.get("rasura-beyond") == (None if defense == "none" else 0)
    # The server returns the model where it has it, and nothing that looks like it elsewhere.
    returned = {n: torch.tensor(a.numpy()) for n, a in result.arrays.items()}
    assert largest(returned, dict(found)) == 0 if not made.collector.aggregate else not returned
    # Clients evaluate the opened model: the figure is that of plain FedAvg.
    sizes = [r.evaluate_metrics_clientapp[2]["size"] for r in (plain, result)]
    assert sizes[0] == pytest.approx(sizes[1], abs=0.1)


@pytest.mark.usefixtures("flower")
def test_flower_goes_on_without_those_who_fail(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    from flwr.app import ConfigRecord

    from rasura.integrations.flower import strategy

    clients, server = sides(DEFENSES[2], keys)

    def tamper(node: int, number: int, reply: Any) -> Any:
        if node == 1 and number == 2 and "rasura" in reply.content:
            reply.content["rasura"] = ConfigRecord({"message": b"garbage"})
        if node == 2 and number == 1 and "rasura" in reply.content:
            reply.content["rasura"] = ConfigRecord({"other": 1})
        return reply

    grid = LocalGrid(range(3), app_of(clients, tamper))
    grid.gone, grid.joins = {3: {0}}, {1: 3}
    made = strategy(server, min_clients=1, first_scale=FIRST, allow_few_clients=True)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        made.start(grid=grid, num_rounds=3)
        logging.getLogger("flwr").removeHandler(caplog.handler)
    refused = {record.getMessage() for record in caplog.records if "is left out" in record.getMessage()}
    assert refused == {
        "round 1: client 2 is left out: its reply does not hold a message of Rasura",
        "round 2: client 1 is left out: these bytes are not a message of Rasura",
    }
    weights = dict(clients.start)
    for present in ((0, 1), (0, 2, 3), (1, 2, 3)):
        weights = {n: w.float() for n, w in averaged(weights, present).items()}
    found = opened(clients, made.collector.visible(), made.collector.aggregate).weights
    assert largest(dict(found), weights) < 1e-3 * largest(weights, dict(clients.start))


@pytest.mark.usefixtures("flower")
def test_flower_refuses_too_many_clients_and_reports_clients_that_cannot_open(keys: Keys) -> None:
    from rasura.integrations.flower import strategy

    clients, server = sides(DEFENSES[2], keys)
    grid = LocalGrid(range(5), app_of(clients))
    with pytest.raises(InputError, match="5 clients would train, but these keys fit 4"):
        strategy(server).start(grid=grid, num_rounds=1)
    assert grid.sent == 0
    other = agree(DEFENSES[2], model(), make_keys(4))
    mixed = {0: app_of(clients), 1: app_of(clients), 2: app_of(other)}
    with pytest.raises(RoundFailed, match="client 2: its key is"):
        strategy(server, min_clients=3).start(grid=LocalGrid(range(3), lambda n, m: mixed[n](n, m)), num_rounds=1)
    # From the second round on the wrong key cannot open what it is sent.
    answers: list[Any] = []

    def kept(node: int, message: Any) -> Any:
        answers.append((node, mixed[node](node, message)))
        return answers[-1][1]

    strategy(server, min_clients=2, first_scale=FIRST, allow_few_clients=True).start(
        grid=LocalGrid(range(3), kept), num_rounds=2
    )
    errors = {reply.error.reason for node, reply in answers if node == 2 and reply.has_error()}
    assert len(errors) == 1 and errors.pop().startswith("rasura: its key is")


@pytest.mark.usefixtures("flower")
@pytest.mark.parametrize("kind", [InputError, ValueError])
@pytest.mark.parametrize("part", ["app", "setup"])
def test_what_a_clients_own_code_raises_stays_in_its_log(
    part: str, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """It named the file, the row and the label of a text, and the reply brought it to the server."""
    from flwr.app import Context, RecordDict

    from rasura.integrations.flower import protection_mod, strategy

    told, public, answers = "/ward/hiv.jsonl, row 12: label 7 is none of the classes", agree("none", model()), []

    def raises(*given: Any) -> Any:
        raise kind(told)

    app, mod = app_of(public, trains=raises), protection_mod(raises)

    def answer(node: int, message: Any) -> Any:
        context = Context(1, node, {}, RecordDict(), {})
        answers.append(app(node, message) if part == "app" else mod(message, context, lambda *given: message))
        return answers[-1]

    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        with pytest.raises(RoundFailed, match="0 updates are valid"):
            strategy(public).start(grid=LocalGrid(range(3), answer), num_rounds=1)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    reasons = {answer.error.reason for answer in answers}
    assert reasons == {f"rasura: the {part} of this client failed ({kind.__name__}); its own log says why"}
    assert told in caplog.text


# The app that ``rasura new federated`` writes.


@pytest.mark.usefixtures("flower")
def test_without_data_each_client_has_enough_notes_of_both_kinds(app_modules: Path, folder: Path) -> None:
    import importlib

    from flwr.app import Context, RecordDict
    from transformers import BertTokenizerFast

    config = tomllib.loads((app_modules / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"model": str(folder / "model")}
    # A vocabulary that tells the notes apart.
    words = {w for n in fictional_notes(240) for w in re.findall(r"[a-z]+|[^a-z0-9 ]", n.text.lower())}
    digits = [f"{before}{d}" for before in ("", "##") for d in range(10)]
    kept = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *digits, *sorted(words)]
    BertTokenizerFast(vocab={w: k for k, w in enumerate(kept)}, model_max_length=64).save_pretrained(str(folder / "model"))
    task = importlib.import_module("federated.task")
    for part in range(3):
        rows, held = task.texts(Context(1, part, {"partition-id": part, "num-partitions": 3}, RecordDict(), config))
        assert (len(rows), len(held)) == (64, 16)
        assert {int(r.labels[0]) for r in rows} == {int(r.labels[0]) for r in held} == {0, 1}


@pytest.mark.slow
@pytest.mark.usefixtures("flower", "minilm_path")
def test_the_app_learns_from_the_notes_that_it_comes_with(app_modules: Path, folder: Path) -> None:
    rounds = simulated(app_modules, folder, model="minilm", data="", defense="none")
    losses = [r["evaluate"]["loss"] for r in rounds.values()]
    assert losses[1] < losses[0] and rounds["2"]["evaluate"]["accuracy"] > 0.9


@pytest.mark.usefixtures("flower")
def test_the_app_trains_weights_and_adapters_behind_sealing(app_modules: Path, folder: Path) -> None:
    pytest.importorskip("peft")
    for lora in (0, 2):
        rounds = simulated(
            app_modules,
            folder,
            update=f"local:batch=16/lr=5e-5/lora={lora}",
            save=str(folder / f"kept-{lora}" / "{client}-{round}"),
        )
        assert [r["server"]["counted"] for r in rounds.values()] == [2, 2]
        assert all(0 <= r["evaluate"]["accuracy"] <= 1 and r["train"]["rasura-beyond"] == 0 for r in rounds.values())
        # Everything is sealed: the server has nothing to send but the sum.
        assert rounds["1"]["server"]["bytes_down"] == 0 < rounds["2"]["server"]["bytes_down"]
        name = "adapter_model.safetensors" if lora else "model.safetensors"
        kept = [(folder / f"kept-{lora}" / k / name).read_bytes() for k in ("0-1", "0-2", "1-2")]
        assert kept[0] != kept[1] == kept[2]


@pytest.mark.usefixtures("flower")
def test_what_the_server_records_is_read_without_protection_and_not_behind_it(app_modules: Path, folder: Path) -> None:
    from rasura.runs.reading import ReadRequest, read_update
    from rasura.victims.loading import load

    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    for number, update in enumerate(("local:batch=1/optimizer=sgd/lr=0.01", "fedavg-sgd:2:0.01")):
        how: dict[str, Any] = {"update": update, "limit": 1}
        how["test"] = str(folder / "texts.jsonl")
        seen = folder / f"seen-{number}"
        simulated(app_modules, folder, defense="none", record=str(seen), **how)
        for turn in (1, 2):
            victim = load(seen / f"round-{turn}" / "model", "classification")
            for k in range(2):
                file = seen / f"round-{turn}" / f"client-{k}.safetensors"
                assert read_update(file, victim, ReadRequest(batch_size=1, update=update)).texts == (texts[k],)
        hidden = folder / f"hidden-{number}"
        simulated(app_modules, folder, record=str(hidden), **how)
        victim = load(hidden / "round-1" / "model", "classification")
        file = hidden / "round-1" / "client-0.safetensors"
        read = read_update(file, victim, ReadRequest(batch_size=1, hidden=file.with_suffix(".hidden.safetensors")))
        assert (read.status, read.texts) == ("not_applicable", ())
        assert read.reason.startswith("every entry of the update is hidden")
        with pytest.raises(InputError, match="holds the record of another run"):
            simulated(app_modules, folder, record=str(hidden), **how)


@pytest.mark.usefixtures("flower")
def test_the_app_holds_keys_for_its_owner_and_sends_code_alone(tmp_path: Path) -> None:
    import io
    import zipfile

    from flwr.cli.build import build_fab_from_disk

    from rasura.integrations.flower.new_app import new_app

    place = new_app(tmp_path / "app", 5, by="bfv")
    assert (place / "keys/clients.secret").stat().st_mode & 0o077 == 0
    assert not Keys.load(place / "keys/server.public").secret
    assert Keys.load(place / "keys/clients.secret").parameters.max_clients == 64
    (place / "notes.jsonl").write_text('{"text": "private"}\n')
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(place))) as packed:
        names = set(packed.namelist())
    assert {n for n in names if not n.startswith(("federated/", ".info"))} == {"pyproject.toml"}
    with pytest.raises(InputError, match="already exists"):
        new_app(place)
    with pytest.raises(InputError, match="fits at most 64 clients, but 65 were requested"):
        new_app(tmp_path / "other", 65, by="bfv")
    with pytest.raises(InputError, match=r"2 clients: with two, .*expected at least 3"):
        new_app(tmp_path / "other", 2)
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("flower")
def test_a_round_of_two_is_refused_by_the_app_and_the_strategy_unless_asked_for(
    app_modules: Path, folder: Path, keys: Keys
) -> None:
    from rasura.integrations.flower import strategy

    _, server = sides("none", keys)
    assert strategy(server).collector.min_clients == 3
    with pytest.raises(InputError, match="a round of 2 clients"):
        strategy(server, min_clients=2)
    with pytest.raises(InputError, match="allow-few-clients = true in the app"):
        simulated(app_modules, folder, **{"allow-few-clients": False})
    told = tomllib.loads((app_modules / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert told["min-clients"] == 3 and told["allow-few-clients"] is False


@pytest.mark.slow
@pytest.mark.usefixtures("flower")
def test_the_masks_of_a_clients_dropout_do_not_hang_on_the_runs_seed(app_modules: Path, folder: Path) -> None:
    """Every client and the server know the seed."""
    # All texts at once, whose order says nothing; and the loss behind the masks, which float32 does not round away.
    whole = {"update": "local:batch=0/optimizer=sgd/lr=0.1", "num-server-rounds": 1}

    def loss(defense: str) -> float:
        torch.manual_seed(0)
        told = simulated(app_modules, folder, defense=f"{defense}sealing:all/scheme=bfv", **whole)
        return float(told["1"]["train"]["train-loss"])

    still, masked = ([loss(defense) for _ in range(count)] for defense, count in (("", 2), ("dropout:0.5+", 4)))
    assert max(still) - min(still) < 1e-4 < 3e-4 < max(masked) - min(masked)
    assert abs(loss("dropout:0.5+") - loss("dropout:0.5+")) > 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("flower")
@pytest.mark.parametrize("where", ["simulation", "loopback"])
def test_flwr_run_trains_the_app(where: str, folder: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "federated.py"
    command = [sys.executable, str(script), str(folder / "texts.jsonl"), "--model", str(folder / "model"), "--where", where]
    command += ["--clients", "2", "--rounds", "2", "--update", STEPS, "--json", str(folder / "found.json")]
    done = subprocess.run(
        [*command, "--defense", "none,sealing:all/scheme=bfv"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "found.json").read_text())
    for one in found.values():
        assert one["clients_agree"] and [r["server"]["counted"] for r in one["rounds"].values()] == [2, 2]
    # A step of the first round's scale, and what float32 rounds; in the next AdamW has trained on from there.
    first, second = found["sealing:all/scheme=bfv"]["difference"].values()
    assert first < 1e-6 and second < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("flower")
def test_a_supernode_killed_in_a_round_leaves_the_others_theirs(folder: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "federated.py"
    command = [sys.executable, str(script), str(folder / "texts.jsonl"), "--model", str(folder / "model"), "--kill"]
    command += ["--where", "loopback", "--clients", "3", "--rounds", "2", "--update", STEPS]
    command += ["--json", str(folder / "left.json")]
    done = subprocess.run([*command, "--defense", "sealing:all/scheme=bfv"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "killed one SuperNode" in done.stdout
    (one,) = json.loads((folder / "left.json").read_text()).values()
    assert [r["server"]["counted"] for r in one["rounds"].values()] == [2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("flower")
def test_eight_supernodes_sum_securely_though_two_are_killed_in_mid_round(folder: Path) -> None:
    """One SuperLink and eight SuperNodes as processes. One is killed before it sends shares, one before it sends its update;
    the other six finish the round. Plain FedAvg of the same six is the reference."""
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "federated.py"
    rows = [{"text": f"w{20 + k} w{60 + 3 * k} w{100 + 5 * k} w{30 + k}", "label": k % 2} for k in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    command = [sys.executable, str(script), str(folder / "texts.jsonl"), "--model", str(folder / "model"), "--kill", "2"]
    command += ["--where", "loopback", "--clients", "8", "--rounds", "1", "--json", str(folder / "left.json")]
    done = subprocess.run([*command, "--defense", "sealing:all/by=secagg,none"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("killed one SuperNode") == 2
    found = json.loads((folder / "left.json").read_text())
    for one in found.values():
        assert one["clients_agree"] and [r["server"]["counted"] for r in one["rounds"].values()] == [6]
    assert max(found["none"]["difference"].values()) < 1e-6


@pytest.mark.usefixtures("flower")
def test_the_app_sums_securely_by_default_with_identities_and_no_other_keys(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rasura.integrations.flower.new_app import new_app

    place = new_app(folder / "app")
    monkeypatch.syspath_prepend(str(place))
    told = tomllib.loads((place / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert told["defense"] == "sealing:all/by=secagg" and told["min-clients"] == 3
    held = {p.name: p.stat().st_mode & 0o777 for p in (place / "keys").iterdir()}
    assert held.pop("identities.public") and set(held.values()) == {0o600} and len(held) == 4
    assert "$" not in (place / "README.md").read_text()
    try:
        rounds = simulated(place, folder, save=str(folder / "kept" / "{client}-{round}"))
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "federated"]:
            del sys.modules[name]
    assert [r["server"]["counted"] for r in rounds.values()] == [2, 2]
    assert all(r["train"]["rasura-beyond"] == 0 for r in rounds.values())
    kept = [(folder / "kept" / k / "model.safetensors").read_bytes() for k in ("0-1", "0-2", "1-2")]
    assert kept[0] != kept[1] == kept[2]


@pytest.mark.usefixtures("flower")
def test_the_app_with_identities_says_what_to_empty_for_another_defense(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rasura.integrations.flower.new_app import new_app

    place = new_app(folder / "app", 3)
    monkeypatch.syspath_prepend(str(place))
    try:
        with pytest.raises(InputError, match='leave identities empty: identities = ""'):
            simulated(place, folder, defense="none")
        rounds = simulated(place, folder, defense="none", identities="")
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "federated"]:
            del sys.modules[name]
    assert [r["server"]["counted"] for r in rounds.values()] == [2, 2]


@pytest.mark.usefixtures("flower")
def test_the_app_counts_rounds_with_noise_in_a_file_and_goes_on_there(
    app_modules: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = folder / "ledger.json"
    noise = {
        "defense": "sealing:all/by=secagg/noise=1.0",
        "clients-key": "",
        "server-key": "",
        "identities": "",
        "identity": "",
    }
    for runs in (1, 2):
        simulated(app_modules, folder, ledger=str(ledger), **noise)
        assert len(ledger.read_text().splitlines()) == 1 + 2 * runs
        assert f"in the {2 * runs} rounds that this ledger counted" in capsys.readouterr().out


@pytest.mark.usefixtures("flower")
def test_a_start_other_than_the_agreed_one_is_refused_and_so_is_measuring_a_sealed_model(keys: Keys) -> None:
    from rasura.integrations.flower import strategy
    from rasura.integrations.flower.library import record

    def measured(number: int, arrays: Any) -> None:
        seen.append(number)

    seen: list[int] = []
    clients, server = sides("none", keys)
    begin = {"grid": LocalGrid(range(3), app_of(clients)), "num_rounds": 1, "evaluate_fn": measured}
    other = record({n: t + 1 for n, t in server.start.items()})
    for wrong in (other, record(dict(list(server.start.items())[1:]))):
        with pytest.raises(InputError, match="initial_arrays are not the agreed weights"):
            strategy(server).start(**begin, initial_arrays=wrong)
    strategy(server).start(**begin, initial_arrays=record(server.start))
    assert seen == [0, 1]
    clients, server = sides("sealing:param=0.1/embeddings=sealed/scheme=bfv", keys)
    with pytest.raises(InputError, match="evaluate_fn would measure a model that the server does not have"):
        strategy(server, first_scale=FIRST).start(**{**begin, "grid": LocalGrid(range(3), app_of(clients))})
    assert seen == [0, 1]
