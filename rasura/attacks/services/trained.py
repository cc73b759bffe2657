"""Trained attacks: the adversary obfuscates the public model with its own keys and learns to invert the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rasura.attacks.services.tables import KEPT, word_table
from rasura.core.answers import ServiceObservation, TokenReading
from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.rng import child, generator, seeded
from rasura.core.specs import ServiceAttackSpec
from rasura.core.values import UNKNOWN
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.service_protections.service import states_sent
from rasura.service_protections.services import custext, obfuslm, plain, santext, sentinel
from rasura.service_protections.split import Split

DEPTH = 3
"""Blocks whose output InvBert inverts (ObfusLM, appendix C.2)."""

LONGEST, BATCH = 64, 32


@dataclass(frozen=True)
class InvBert:
    """Learns to name tokens from the states behind the first three blocks (Kugler et al. 2021).

    As in ObfusLM the adversary obfuscates the public model itself and runs reference text through it. The inverter is one
    hidden layer, place by place, and the public embedding as output, instead of a whole BERT. It learns on the tokens of
    the reference text and names any public token.
    """

    name: str = "invbert"
    work: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"quick": (256, 4), "default": (2000, 8), "paper": (20000, 10)}
    )
    """Budget level -> reference texts, epochs."""

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        count, epochs = self.work[budget.level]
        own = own_service(seen, count, child(rng))
        ids, inputs = own.ids, torch.cat(own.states())
        special = torch.tensor(sorted(seen.vocabulary.special_ids))
        named = _named(ids, seen.vocabulary.special_ids)
        wanted = torch.cat([torch.tensor(t) for t in ids])
        private = torch.isin(wanted, named)
        table, targets = word_table(seen.public), torch.searchsorted(named, wanted[private])
        usable = torch.arange(len(table))[~torch.isin(torch.arange(len(table)), special)]
        learned = _fitted(inputs[private], targets, table[named], epochs, rng)
        inverter = learned.widened(table[usable], torch.searchsorted(usable, named))
        ranked = []
        for text, states in zip(seen.ids, own.seen_states()):
            with torch.no_grad():
                guess = usable[inverter(states).topk(min(KEPT, len(usable)), dim=1).indices]
            fixed = torch.isin(torch.tensor(text), special)
            guess[fixed, 0] = torch.tensor(text)[fixed]
            ranked.append(guess)
        return TokenReading(tuple(ranked), details={"reference_texts": len(ids)})


@dataclass(frozen=True)
class MultiLabel:
    """MLC: learns which tokens a text holds from its mean state (Song and Raghunathan 2020); a bag of tokens."""

    name: str = "mlc"
    work: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"quick": (256, 10), "default": (2000, 30), "paper": (20000, 50)}
    )

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        count, epochs = self.work[budget.level]
        own = own_service(seen, count, child(rng))
        ids = own.ids
        special = torch.tensor(sorted(seen.vocabulary.special_ids))
        named = _named(ids, seen.vocabulary.special_ids)
        whole = torch.stack([s.mean(0) for s in own.states(last=True)])
        target = torch.stack([torch.isin(named, torch.tensor(t)).float() for t in ids])
        centre, spread = whole.mean(0), whole.std(0).clamp_min(1e-6)
        with seeded(child(rng)), torch.enable_grad():
            layer = nn.Linear(whole.shape[1], len(named))
            optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
            for _ in range(epochs):
                for some in torch.split(torch.randperm(len(whole)), BATCH):
                    scores = layer((whole[some] - centre) / spread)
                    loss = nn.functional.binary_cross_entropy_with_logits(scores, target[some])
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
        ranked = []
        for text, states in zip(seen.ids, own.seen_states(last=True)):
            with torch.no_grad():
                scores = layer((states.mean(0) - centre) / spread)
            # How many tokens the text has is seen: as many are named.
            most = int((~torch.isin(torch.tensor(text), special)).sum())
            best = named[scores.topk(min(most, len(named))).indices]
            ranked.append(best[:, None] if len(best) else torch.full((1, 1), UNKNOWN))
        return TokenReading(tuple(ranked), ordered=False, details={"reference_texts": len(ids)})


@dataclass(frozen=True)
class OwnService:
    """The adversary's own service: reference texts as ``ids`` and as ``sent`` to ``model``, or as states where those are."""

    seen: ServiceObservation
    model: nn.Module
    ids: list[list[int]]
    sent: list[list[int]]
    vectors: tuple[Tensor, ...] = ()

    def states(self, *, last: bool = False) -> list[Tensor]:
        """The states behind block ``DEPTH`` (or the last) of each reference text, ``(length, hidden)``."""
        if self.vectors:
            return [_received(self.model, v, last) for v in self.vectors]
        return [s for some in _batches(self.sent) for s in _states(self.model, some, last=last)]

    def seen_states(self, *, last: bool = False) -> list[Tensor]:
        """The same of what was observed."""
        if self.seen.vectors:
            return [_received(self.seen.served, v, last) for v in self.seen.vectors]
        # Replaced tokens are ids of the public model: what the served one learned since says nothing of them.
        model = self.model if self.model is self.seen.public else self.seen.served
        return [s for text in self.seen.ids for s in _states(model, [text], last=last)]


def own_service(seen: ServiceObservation, count: int, seed: int) -> OwnService:
    """The adversary's own service behind the announced mechanism, with up to ``count`` reference texts.

    Keys and noise are its own. Where states are sent the client's half, trained or not, is that of every client.
    """
    words, ids = seen.vocabulary, reference_ids(seen, count)
    rng, told = generator(seed, "own"), dict[str, Any](seen.mechanism.parameters)
    if isinstance(seen.served, Split):
        return OwnService(seen, seen.served, ids, ids, states_sent(seen.served, ids, rng))
    match seen.mechanism.name:
        case "none":
            made = plain(seen.public, words)
        case "obfuslm":
            made = obfuslm(seen.public, words, settings=ObfuscationSettings(**told), rng=rng)
        case "sentinellms":
            made = sentinel(seen.public, words, **told, rng=rng)
        case "santext+":
            made = santext(seen.public, words, **told)
        case "custext+":
            made = custext(seen.public, words, **told)
        case name:
            raise NotApplicable(f"the protection {name} is unknown, so the adversary cannot build such a service")
    return OwnService(seen, made.served.eval(), ids, list(map(list, made.sent(ids, rng))))


def reference_ids(seen: ServiceObservation, count: int) -> list[list[int]]:
    """The ids of up to ``count`` reference texts, special ones included. Raises ``NotApplicable`` where none has a usable
    length."""
    words = seen.vocabulary
    coded = [[*words.prefix, *words.encode(t), *words.suffix] for t in seen.reference_text[:count]]
    ids = [t for t in coded if len(words.prefix) + len(words.suffix) < len(t) <= LONGEST]
    if not ids:
        raise NotApplicable(f"no reference text has 1 to {LONGEST} tokens to learn from")
    return ids


def _received(split: nn.Module, vectors: Tensor, last: bool) -> Tensor:
    """The states that the server computes of a text's ``vectors``; what came from behind more blocks is taken as it is."""
    if not isinstance(split, Split):
        raise NotApplicable("vectors were sent, but the served model does not take vectors")
    found = split.states(vectors[None], torch.ones((1, len(vectors)), dtype=torch.int64))
    return found[-1 if last else min(max(0, DEPTH - split.depth), len(found) - 1)][0]


def _named(texts: Sequence[Sequence[int]], special: frozenset[int]) -> Tensor:
    """The tokens of ``texts``, each once, in rising order, special ones left out."""
    return torch.tensor(sorted({i for text in texts for i in text} - special))


def _batches(texts: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
    return [texts[n : n + BATCH] for n in range(0, len(texts), BATCH)]


@torch.no_grad()
def _states(model: Any, texts: Sequence[Sequence[int]], *, last: bool = False) -> list[Tensor]:
    """The states behind block ``DEPTH`` (or the last) of each text, ``(length, hidden)``."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*t, *[0] * (longest - len(t))] for t in texts])
    mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in texts])
    body = getattr(model, "base_model", model)
    found = body(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    whole = found[-1 if last else min(DEPTH, len(found) - 1)]
    return [row[: len(t)].float() for row, t in zip(whole, texts)]


class Inverter(nn.Module):
    """States ``(n, hidden)`` to scores of tokens, whose public rows are the output layer."""

    names: Tensor

    def __init__(self, names: Tensor) -> None:
        super().__init__()
        width = names.shape[1]
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.skip = nn.Linear(width, width)
        self.register_buffer("names", nn.functional.normalize(names, dim=1))
        self.scale = nn.Parameter(torch.tensor(16.0))
        self.bias = nn.Parameter(torch.zeros(len(names)))

    def forward(self, states: Tensor) -> Tensor:
        """Scores ``(n, tokens)``."""
        turned = self.skip(states) + self.second(nn.functional.gelu(self.first(states)))
        out: Tensor = self.scale * nn.functional.normalize(turned, dim=1) @ self.names.T + self.bias
        return out

    def widened(self, names: Tensor, learned: Tensor) -> Inverter:
        """This inverter with ``names`` as outputs. Those at ``learned`` are its own; the others count as its rarest one."""
        made = Inverter(names)
        made.load_state_dict({k: v for k, v in self.state_dict().items() if k not in ("names", "bias")}, strict=False)
        with torch.no_grad():
            made.bias.fill_(float(self.bias.min()))
            made.bias[learned] = self.bias
        return made.requires_grad_(False)


def _fitted(states: Tensor, wanted: Tensor, names: Tensor, epochs: int, rng: torch.Generator) -> Inverter:
    with seeded(child(rng)), torch.enable_grad():
        inverter = Inverter(names)
        optimizer = torch.optim.AdamW(inverter.parameters(), lr=1e-3)
        for _ in range(epochs):
            for some in torch.split(torch.randperm(len(states)), 256):
                loss = nn.functional.cross_entropy(inverter(states[some]), wanted[some])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return inverter.requires_grad_(False)


INVBERT = ServiceAttackSpec(
    name="invbert",
    about="a model trained to predict tokens from hidden states",
    source="Kugler et al. 2021; ObfusLM, app. C.2",
    make=InvBert,
)

MLC = ServiceAttackSpec(
    name="mlc",
    about="a classifier that predicts which tokens a text contains",
    source="Song and Raghunathan 2020; ObfusLM, app. C.2",
    make=MultiLabel,
)
