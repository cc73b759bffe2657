"""Three clients train together with Flower: plain FedAvg, a tenth sealed, everything sealed, in the same session.

    python benchmarks/federated.py DATA/sst2.train.parquet --test DATA/sst2.validation.parquet
    python benchmarks/federated.py DATA/sst2.train.parquet --where loopback --defense sealing:all/scheme=bfv --rounds 1

Every run is ``flwr run`` of the app that ``rasura new federated`` writes: on the Ray simulation engine, or over a SuperLink
and SuperNodes on loopback. All processes are started and ended here, on ports that are free; nothing goes to
the user's home.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rasura.data.classes import model_classes
from rasura.data.text import load_labelled
from rasura.integrations.flower.identities import make_identities
from rasura.integrations.flower.new_app import new_app
from rasura.victims.weights import classes_for

DEFENSES = ("none", "sealing:param=0.1/scheme=bfv", "sealing:all/scheme=bfv")
FLAGS = ("--insecure", "--host", "127.0.0.1")


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(home: Path) -> dict[str, str]:
    """Flower without telemetry and updates, its files in ``home``."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    root = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **quiet, "FLWR_HOME": str(home), "PATH": path, "PYTHONPATH": root}


@contextmanager
def process(command: list[str], home: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which is ended with all that it started."""
    with log.open("wb") as out:
        running = subprocess.Popen(command, env=environment(home), stdout=out, stderr=out, start_new_session=True)
    try:
        yield running
    finally:
        # The group outlives its leader: simulations and Ray's workers are in it.
        begun, number = time.monotonic(), signal.SIGTERM
        while time.monotonic() - begun < 40:
            try:
                os.killpg(running.pid, number)
            except ProcessLookupError:
                break
            time.sleep(0.5)
            running.poll()
            number = signal.SIGKILL if time.monotonic() - begun > 10 else number


def waited(port: int, log: Path) -> None:
    """Until a SuperLink answers on ``port``."""
    for _ in range(240):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"no SuperLink answered within two minutes; see {log}")


@contextmanager
def federation(
    where: str, clients: int, home: Path, kill_at: tuple[int, ...] = (), absent: tuple[int, ...] = ()
) -> Iterator[None]:
    """A SuperLink with ``clients`` nodes, simulated or as SuperNodes, known to ``flwr run`` as ``bench``.

    ``kill_at``: for the last SuperNode, the one before it and so on, at which message of the run it is killed with all that
    it started: under secure aggregation 1 (keys), 2 (shares), 3 (update), 4 (signatures) or 5 (opening). ``absent``:
    SuperNodes never started.
    """
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    lines = ("[superlink]", 'default = "bench"', "[superlink.bench]", f'address = "127.0.0.1:{port}"', "insecure = true")
    (home / "config.toml").write_text("\n".join(lines) + "\n")
    with ExitStack() as stack:
        link = ["flower-superlink", *FLAGS, "--disable-runtime-dependency-installation", "--port", str(port)]
        link += ["--simulation"] if where == "simulation" else []
        stack.enter_context(process(link, home, home / "superlink.log"))
        waited(port, home / "superlink.log")
        nodes = {}
        for k in sorted(set(range(clients if where == "loopback" else 0)) - set(absent)):
            command = ["flower-supernode", *FLAGS, "--port", str(free_port()), "--superlink", f"127.0.0.1:{port}"]
            command += ["--node-config", f"partition-id={k} num-partitions={clients}"]
            nodes[k] = stack.enter_context(process(command, home, home / f"supernode-{k}.log"))
        for number, message in enumerate(kill_at):
            place = clients - 1 - number
            told = (nodes[place], home / f"supernode-{place}.log", message)
            threading.Thread(target=killed, args=told, daemon=True).start()
        yield


def killed(node: subprocess.Popen[bytes], log: Path, message: int) -> None:
    """Kill a SuperNode in the middle of a round: when it has its ``message``-th message to train, before it can answer."""
    while log.read_text(encoding="utf-8", errors="replace").count("Receiving: train message") < message:
        time.sleep(0.05)
    os.killpg(node.pid, signal.SIGKILL)
    print("killed one SuperNode in the middle of a round", flush=True)


def toml(config: dict[str, Any]) -> str:
    """A run's configuration as ``flwr run`` takes it."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())


def run(app: Path, where: str, clients: int, home: Path, config: dict[str, Any], timeout: float) -> dict[str, Any]:
    """One ``flwr run`` to its end; the server's figures. Raises ``SystemExit`` with the log's end where there are none."""
    results = Path(config["results"])
    results.unlink(missing_ok=True)
    command = ["flwr", "run", str(app), "bench", "--stream", "--run-config", toml(config)]
    if where == "simulation":
        command += ["--federation-config", f"num-supernodes={clients} client-resources-num-cpus=1"]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=timeout, check=False)
    if not results.exists():
        raise SystemExit(f"flwr run brought no result:\n{(done.stdout + done.stderr)[-3000:]}")
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return found


def difference(one: Path, other: Path) -> float:
    """The largest difference of two models' weights."""
    first, second = (load_file(str(p / "model.safetensors")) for p in (one, other))
    return max(float((first[n] - second[n]).abs().max()) for n in first)


def ended(*_: Any) -> None:
    """An end from outside, too, ends what was started here; a second one must not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main() -> None:
    """Run the settings one after the other and print a table, and JSON with ``--json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--test")
    parser.add_argument("--tested", type=int, default=300, help="sentences of the test file")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--where", choices=("simulation", "loopback"), default="simulation")
    parser.add_argument("--defense", default=",".join(DEFENSES))
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--update", default="local:epochs=1/batch=16/optimizer=adamw/lr=5e-4")
    parser.add_argument("--timeout", type=float, default=3600)
    parser.add_argument("--kill", type=int, nargs="?", const=1, default=0, help="SuperNodes to kill in the first round")
    parser.add_argument("--kill-at", default="", help="instead: at which message each of the last SuperNodes is killed: 2,3")
    parser.add_argument("--json")
    told = parser.parse_args()
    at = tuple(int(m) for m in told.kill_at.split(",") if m) or ((1,) if told.kill == 1 else tuple(range(2, 2 + told.kill)))
    if at and (told.where != "loopback" or told.clients <= len(at)):
        parser.error("--kill needs --where loopback and more clients than it kills")
    signal.signal(signal.SIGTERM, ended)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        app = new_app(place / "app", max(3, told.clients), by="bfv")
        common: dict[str, Any] = {
            "num-server-rounds": told.rounds, "min-clients": told.clients - len(at), "allow-few-clients": True,
            "model": told.model, "limit": told.limit,
            "data": str(Path(told.data).resolve()), "update": told.update, "results": str(place / "results.json"),
            "timeout": told.timeout, "identity": str(place / "identity-{client}.secret"),
        }  # fmt: skip
        known = str(make_identities(place, told.clients)[-1])
        if told.test:
            count = classes_for(told.model, 0)
            rows = load_labelled(told.test, model_classes(told.model), told.model, count=count)[: told.tested]
            lines = "".join(json.dumps({"text": e.text, "label": e.label}) + "\n" for e in rows)
            (place / "test.jsonl").write_text(lines, encoding="utf-8")
            common["test"] = str(place / "test.jsonl")
        defenses = list(enumerate(told.defense.split(",")))
        # The first run loses SuperNodes; the others are run by those whose updates it counted. Messages after the third
        # open a sum that their updates are in already.
        lost = tuple(told.clients - 1 - number for number, message in enumerate(at) if message < 4)
        parts = [(defenses[:1], at, ()), (defenses[1:], (), lost)] if told.kill_at else [(defenses, at, ())]
        for some, kill_at, absent in parts:
            home = place / f"flwr-{len(found)}"
            with federation(told.where, told.clients, home, kill_at, absent):
                for number, defense in some:
                    kept = place / f"models-{number}"
                    named = known if "by=secagg" in defense else ""
                    config = {**common, "defense": defense, "identities": named, "save": str(kept / "{client}" / "{round}")}
                    one = run(app, told.where, told.clients, home, config, told.timeout)
                    one["difference"] = {
                        r: difference(kept / "0" / r, place / "models-0" / "0" / r) for r in one["rounds"] if number
                    }  # fmt: skip
                    one["clients_agree"] = max(difference(kept / "0" / r, kept / "1" / r) for r in one["rounds"]) == 0.0
                    found[defense] = one
                    if told.json:
                        Path(told.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
                    show(defense, one)


def show(defense: str, one: dict[str, Any]) -> None:
    """One line a round."""
    for r, figures in one["rounds"].items():
        server, sent, judged = figures["server"], figures["train"], figures["evaluate"]
        if not server["counted"]:
            print(f"{defense} round {r}: none counted, since clients refuse the sum of the round before", flush=True)
            continue
        measured = "accuracy not measured"
        if judged:
            measured = f"accuracy {judged['accuracy']:.4f}, loss {judged['loss']:.4f} by {server['evaluated']} clients"
        beyond = f"{sent['rasura-beyond']:.0f} beyond, " if "rasura-beyond" in sent else ""
        up, down = server["bytes_up"] / server["counted"] / 1e6, server["bytes_down"] / 1e6
        print(
            f"{defense} round {r}: {server['counted']} counted, "
            f"{measured}, "
            f"{server['waited_seconds']:.1f} s waited, {server['adding_cpu_seconds']:.1f} s CPU adding, "
            f"{sent['rasura-cpu-seconds']:.1f} s CPU a client protecting, {up:.2f} MB up and {down:.2f} MB down a client, "
            f"{beyond}difference {one['difference'].get(r)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
