"""What secure sums cost: plain, BFV and SecAgg+ on one update in one run; and how SecAgg+ grows with the number of clients.

python benchmarks/secure_aggregation.py costs
python benchmarks/secure_aggregation.py growth --clients 10,30,100,300,1000
python benchmarks/secure_aggregation.py growth --clients 100,300,1000 --bear 1/10
python benchmarks/secure_aggregation.py lists --clients 8,1000
python benchmarks/secure_aggregation.py noise

``costs``: the gradient of MiniLM, 22.7 million values, as the update of each of eight clients. Equal updates are the
worst case for the error, since all clients round alike. ``growth``: vectors of ``--values`` numbers, a twentieth of the
clients gone before they send their update; ``--bear`` is the fraction of clients that may collude, and that may be gone.
``lists``: what it costs beside the rest of a round with identities that all clients check the list of survivors.
``noise``: the sum of four clients' noise beside the central law; and what telling an update of the largest norm from zeros
shows of epsilon, beside what the ledger states.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta, kstest

from rasura.accounting.distributed import SumLedger
from rasura.core.ciphers import SIGNATURE, SigningKey
from rasura.data.text import Example, encode
from rasura.defenses.homomorphic import Sealed, added, opened_sum, seal
from rasura.defenses.homomorphic_keys import Context, make_keys
from rasura.defenses.sealing import agreed_scales, flattened
from rasura.defenses.secure_aggregation.client import Client
from rasura.defenses.secure_aggregation.encoding import Blocks, Encoding, decoded, encoded
from rasura.defenses.secure_aggregation.graph import Bounds, plan
from rasura.defenses.secure_aggregation.messages import HEAD, Setting
from rasura.defenses.secure_aggregation.noise import NORM, clipped, discrete_gaussian, sigma_of
from rasura.defenses.secure_aggregation.server import Opened, Server
from rasura.victims.loading import load
from rasura.victims.step import gradients

TEXT = "The patient was moved to the ward after the second blood test."


class Clock:
    """CPU seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, what: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = what()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start
        return found


def update() -> tuple[NDArray[np.float64], Blocks]:
    """The gradient of MiniLM on one sentence, and one block for each tensor, its scale twice its largest entry."""
    victim = load("minilm", "classification")
    batch = encode([Example(TEXT, None, 1)], victim.tokenizer, "classification", max_length=64, num_labels=2)
    found, _ = gradients(victim.model, batch.inputs())
    scales = agreed_scales(found)
    values, _ = flattened(found, {n: torch.ones(g.shape, dtype=torch.bool) for n, g in found.items()}, scales)
    exponents = tuple(max(-120, math.ceil(math.log2(s))) for s in scales.values())
    return values, Blocks(tuple(g.numel() for g in found.values()), exponents)


def line(name: str, each: float, client: float, server: float, opening: float, error: float, step: float) -> None:
    """One row of the table: bytes a value, CPU seconds, the largest error of the mean beside the largest step."""
    print(
        f"| {name} | {each:.3f} | {each / 4:.3f} | {client:.1f} | {server:.1f} | {opening:.1f} | {error:.1e} | {step:.1e} |",
        flush=True,
    )


@dataclass
class Played:
    """One round: bytes of all clients up and down, CPU seconds, and the sum."""

    setting: Setting
    clients: int
    clock: Clock = field(default_factory=Clock)
    up: int = 0
    down: int = 0

    def run(self, answer: Callable[[Client, bytes], bytes], gone: int) -> Opened:
        """All stages; ``answer`` masks a client's update, ``gone`` clients disappear before that."""
        people = {k: Client(self.setting) for k in range(self.clients)}
        self.server: Server[int] = Server(self.setting)
        self._stage(dict.fromkeys(people, b""), lambda k, told: people[k].keys(), self.server.keys)
        self._stage(self.clock("server", self.server.roster), lambda k, told: people[k].shares(told), self.server.shares)
        inboxes = self.clock("server", self.server.inboxes)
        left = dict(list(inboxes.items())[gone:])
        self._stage(left, lambda k, told: answer(people[k], told), self.server.masked)
        survivors = self.clock("server", self.server.survivors)
        self._stage(survivors, lambda k, told: people[k].revealed(told), self.server.revealed)
        found: Opened = self.clock("opening", self.server.opened)
        return found

    def _stage(
        self, told: Mapping[int, bytes], act: Callable[[int, bytes], bytes], take: Callable[[int, object], None]
    ) -> None:
        for k, one in told.items():
            data = self.clock("client", partial(act, k, one))
            self.up, self.down = self.up + len(data), self.down + len(one)
            self.clock("server", partial(take, k, data))


def noisy(values: NDArray[np.float64], clients: int) -> None:
    """One round of SecAgg+ with noise 1.0 times the clip in the sum; the noise is drawn once, and all clients add the
    same."""
    bits, clip, clock = 24, float(np.linalg.norm(values)), Clock()
    played = Played(Setting(os.urandom(16), 1, bytes(32), len(values), bits, noise="1.0"), clients)
    encoding, shape = Encoding(len(values), bits, clients), plan(clients)
    sigma = sigma_of(1.0, shape.stay - clients // 3, encoding.half)
    drawn = clock("draw", lambda: discrete_gaussian(len(values), sigma))
    found = played.run(lambda client, told: client.masked(told, (clipped(values, clip) + drawn).astype(np.int32)), 0)
    mean, seconds = found.sums * (clip / NORM) / found.clients, played.clock.seconds
    error, each = float(np.abs(mean - values).max()), played.up / found.clients / len(values)
    name = f"SecAgg+ with noise, {bits} bits a value, {encoding.modulus_bits} sent"
    client = seconds["client"] / clients + clock.seconds["draw"]
    line(name, each, client, seconds["server"], seconds["opening"], error, clip / NORM)


def selective(values: NDArray[np.float64], scale: NDArray[np.float64], keys: Context, clients: int, part: int) -> None:
    """BFV for one entry of ``part``, float32 for the others; sealed once and added for all clients."""
    clock, public, some = Clock(), keys.public(), np.arange(len(values)) % part == 0
    sealed, _ = clock("client", lambda: seal(values[some], scale[some], public))
    data = clock("client", lambda: values[~some].astype(np.float32).tobytes())
    received = [np.frombuffer(data, np.float32)] * clients
    total: Sealed = clock("server", lambda: added([sealed] * clients, public))
    clear = clock("server", lambda: np.sum(received, axis=0, dtype=np.float64)) / clients
    mean = np.empty(len(values))
    mean[some] = clock("open", lambda: opened_sum(total, scale[some], keys)) / clients
    mean[~some] = clear
    each = (sum(map(len, sealed.ciphertexts)) + len(data)) / len(values)
    error, seconds = float(np.abs(mean - values).max()), clock.seconds
    step = float(scale.max()) / 32767
    line(f"BFV for 1 of {part}", each, seconds["client"], seconds["server"], seconds["open"], error, step)


def secure(values: NDArray[np.float64], blocks: Blocks, clients: int, bits: int, gone: int) -> None:
    """One round of SecAgg+, in which ``gone`` clients disappear before they send their update."""
    played, encoding = (
        Played(Setting(os.urandom(16), 1, bytes(32), len(values), bits), clients),
        Encoding(len(values), bits, clients),
    )
    found = played.run(lambda client, told: client.masked(told, encoded(values, blocks, encoding)[0]), gone)
    mean = decoded(found.sums, blocks, encoding) / found.clients
    name = f"SecAgg+, {bits} bits a value, {encoding.modulus_bits} sent" + (f", {gone} gone" if gone else "")
    error, step = float(np.abs(mean - values).max()), 2.0 ** max(blocks.exponents) / encoding.half
    seconds, each = played.clock.seconds, played.up / found.clients / len(values)
    line(name, each, seconds["client"] / clients, seconds["server"], seconds["opening"], error, step)


def costs(clients: int) -> None:
    """The table of one update by each way."""
    values, blocks = update()
    print(f"{len(values)} values, {clients} clients; CPU seconds of each client, of the server, of opening the sum\n")
    print(
        "| way | bytes a value | x float32 | client | server | opening | error of the mean | largest step |\n"
        + "|---" * 8
        + "|"
    )
    clock, plain = Clock(), values.astype(np.float32)
    data = clock("client", plain.tobytes)

    received = [np.frombuffer(data, np.float32)] * clients
    mean = clock("server", lambda: np.sum(received, axis=0, dtype=np.float64)) / clients
    error = float(np.abs(mean - values).max())
    line("plain float32", 4.0, clock.seconds["client"], clock.seconds["server"], 0.0, error, 0.0)
    for bits, gone in ((16, 0), (29, 0), (16, 2)):
        secure(values, blocks, clients, bits, gone)
    noisy(values, clients)
    keys, scale = make_keys(clients, "bfv"), np.repeat([2.0**e for e in blocks.exponents], blocks.lengths)
    public = keys.public()
    sealed, _ = clock("seal", lambda: seal(values, scale, public))
    each = sum(map(len, sealed.ciphertexts)) / len(values)
    total: Sealed = clock("add", lambda: added([sealed] * clients, public))
    mean = clock("open", lambda: opened_sum(total, scale, keys)) / clients
    error = float(np.abs(mean - values).max())
    line("BFV", each, clock.seconds["seal"], clock.seconds["add"], clock.seconds["open"], error, float(scale.max()) / 32767)
    selective(values, scale, keys, clients, 10)


def growth(counts: list[int], values: int, bear: Fraction) -> None:
    """Bytes and CPU seconds of one client, beside the update itself, by the number of clients."""
    print(f"{values} values; {bear} of the clients may collude and as many be gone; a twentieth is gone before stage 3\n")
    print("| clients | degree | threshold | bytes up | bytes down | client CPU s | server CPU s | server CPU s a client |")
    print("|---" * 8 + "|", flush=True)
    steps = np.full(values, 7, np.int32)
    for count in counts:
        played = Played(Setting(os.urandom(16), 1, bytes(32), values, 16, Bounds(bear, bear)), count)
        found = played.run(lambda client, told: client.masked(told, steps), count // 20)
        assert set(found.sums) == {7 * found.clients}
        shape, seconds = plan(count, Bounds(bear, bear)), played.clock.seconds
        own = found.clients * Encoding(values, 16, count).packed_bytes
        server = seconds["server"] + seconds["opening"]
        up, down = (played.up - own) / count, played.down / count
        print(f"| {count} | {shape.degree} | {shape.threshold} | {up:,.0f} | {down:,.0f} ", end="")
        print(f"| {seconds['client'] / count:.3f} | {server:.1f} | {server / count:.3f} |", flush=True)


def lists(counts: list[int], values: int) -> None:
    """What clients and the server send and take more where all check the list of survivors, for one client.

    Bytes: the signature with the masked update, the whole stage of signatures, and what opens the sum less the plain list.
    Seconds of a client: that stage and the checks of the last one, by clients that are restored from their state as in
    Flower, so that they read the list of keys once more. Ten clients are timed in this way, and none is gone. Seconds of the
    server: without its check of the one signature that comes with each masked update.
    """
    print("| clients | signatures needed | bytes up | bytes down | client CPU s | wall s | server CPU s a client |")
    print("|---" * 7 + "|", flush=True)
    for count in counts:
        identities = [SigningKey(os.urandom(32)) for _ in range(count)]
        setting = Setting(os.urandom(16), 1, bytes(32), values, 16, identities=tuple(sorted(k.public for k in identities)))
        people = {k: Client(setting, identity) for k, identity in enumerate(identities)}
        server: Server[int] = Server(setting)
        for k, client in people.items():
            server.keys(k, client.keys())
        for k, told in server.roster().items():
            server.shares(k, people[k].shares(told))
        for k, told in server.inboxes().items():
            server.masked(k, people[k].masked(told, np.full(values, 7, np.int32)))
        print(f"| {count} | {server.round.quorum} | " + " | ".join(checked(server, people, identities)) + " |", flush=True)
        assert set(server.opened().sums) == {7 * count}


def checked(server: Server[int], people: dict[int, Client], identities: list[SigningKey]) -> list[str]:
    """The columns of one round, from its masked updates on."""
    count, setting, clock = len(people), server.setting, Clock()
    plain = HEAD + -(-count // 8)
    survivors = clock("server", server.survivors)
    up, down, wall = SIGNATURE * count, sum(len(told) - plain for told in survivors.values()), 0.0
    for k, told in survivors.items():
        begun = time.perf_counter()
        if k < 10:
            people[k] = clock("client", partial(Client.restored, setting, people[k].state(), identities[k]))
        data = clock("client" if k < 10 else "others", partial(people[k].signed, told))
        wall += time.perf_counter() - begun if k < 10 else 0.0
        up, down = up + len(data), down + plain
        clock("server", partial(server.signed, k, data))
    for k, told in clock("server", server.confirmed).items():
        begun = time.perf_counter()
        clock("client" if k < 10 else "others", partial(people[k]._agreed, told))
        wall += time.perf_counter() - begun if k < 10 else 0.0
        down += len(told) - plain
        server.revealed(k, people[k].revealed(told))
    seconds, timed = clock.seconds, min(10, count)
    columns = [f"{up / count:,.0f}", f"{down / count:,.0f}", f"{seconds['client'] / timed:.4f}", f"{wall / timed:.4f}"]
    return [*columns, f"{seconds['server'] / count:.4f}"]


def noise(draws: int, delta: float = 1e-5) -> None:
    """The distance of two distribution functions, and a lower bound of epsilon with 95 % confidence, for one round."""
    clients, half = 4, (1 << 23) - 1
    sigma = sigma_of(1.0, clients, half)
    total = np.sum([discrete_gaussian(2 * draws, sigma) for _ in range(clients)], axis=0)
    wide = math.sqrt(clients) * sigma
    # At this width the discrete law's distribution function is the continuous one's half a step further, to 1e-9.
    distance, p = kstest(total + 0.5, "norm", args=(0.0, wide))
    print(f"KS distance of {2 * draws} sums from the central law of deviation {wide:.0f}: {distance:.5f}, p = {p:.2f}")
    without, present = total[:draws], total[draws:] + NORM
    chosen, counted = slice(0, draws // 2), slice(draws // 2, None)
    best, cut = 0.0, 0.0
    for place in np.linspace(-1, 4, 101) * wide:
        hit, false = (present[chosen] > place).mean(), (without[chosen] > place).mean()
        if false * draws > 200 and hit > delta and math.log((hit - delta) / false) > best:
            best, cut = math.log((hit - delta) / false), float(place)
    n = draws - draws // 2
    hits, falses = int((present[counted] > cut).sum()), int((without[counted] > cut).sum())
    low, high = beta.ppf(0.025, hits, n - hits + 1), beta.ppf(0.975, falses + 1, n - falses)
    ledger = SumLedger(NORM, 1)
    ledger.made(sigma, clients, 0)
    stated, bound = ledger.epsilon(delta), math.log((low - delta) / high)
    print(
        f"noise 1.0 times the clip, one round, delta {delta}: the ledger states {stated:.2f}, measured at least {bound:.2f}"
    )
    print(f"{n} games of each kind; the threshold was chosen on as many others")


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("costs", "growth", "lists", "noise"))
    parser.add_argument("--clients", default="8")
    parser.add_argument("--values", type=int, default=1000)
    parser.add_argument("--bear", type=Fraction, default=Fraction(1, 3))
    told = parser.parse_args()
    counts = [int(k) for k in told.clients.split(",")]
    if told.what == "noise":
        noise(200_000)
    elif told.what == "lists":
        lists(counts, told.values)
    elif told.what == "costs":
        costs(counts[0])
    else:
        growth(counts, told.values, told.bear)


if __name__ == "__main__":
    main()
