"""SDA: sentences put together from the nearest tokens, and chosen by a trained judge (Kambhatla 2018; ObfusLM, app. C.4)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rasura.attacks.services.tables import Tables, cosines, nearest
from rasura.attacks.services.trained import LONGEST
from rasura.core.answers import ServiceObservation, TokenReading
from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.rng import child, generator, seeded
from rasura.core.specs import ServiceAttackSpec
from rasura.core.values import Vocabulary
from rasura.victims.fingerprint import fingerprint
from rasura.victims.models import parts

BATCH = 32
KEPT_JUDGES = 2


@dataclass(frozen=True)
class SubstitutionDecipherment:
    """Beam search over each id's ``tried`` nearest tokens by the score of a model that tells text from corrupted text."""

    name: str = "sda"
    tried: int = 3
    """K_A of the paper."""
    work: Mapping[str, tuple[int, int, int]] = field(
        default_factory=lambda: {"quick": (128, 1, 2), "default": (2000, 2, 4), "paper": (20000, 10, 8)}
    )
    """Budget level -> reference texts, epochs, sentences kept."""

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        count, epochs, beam = self.work[budget.level]
        tables = Tables(seen)
        near, _ = nearest(tables, self.tried)
        options = dict(zip(tables.ids.tolist(), near.tolist()))
        judge = judge_of(seen, tables, count, epochs, self.tried)
        ranked = []
        for text in tables.texts:
            best = judged(text, options, judge, beam, seen.vocabulary.special_ids)
            rows = []
            for i, token in zip(text, best):
                others = [t for t in options.get(i, [i] * self.tried) if t != token]
                rows.append([token, *others, *[token] * self.tried][: self.tried])
            ranked.append(torch.tensor(rows))
        return TokenReading(tuple(ranked))


class Judge(nn.Module):
    """The public model with one score behind its mean state: the higher, the more like text."""

    def __init__(self, model: nn.Module, pad: int) -> None:
        super().__init__()
        self.base: Any = copy.deepcopy(getattr(model, "base_model", model)).requires_grad_(True)
        self.score = nn.Linear(parts(model).hidden, 1)
        self.pad = pad

    def forward(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Scores ``(texts,)``."""
        longest = max(map(len, texts))
        ids = torch.tensor([[*t, *[self.pad] * (longest - len(t))] for t in texts])
        mask = torch.tensor([[1.0] * len(t) + [0.0] * (longest - len(t)) for t in texts])
        states = self.base(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        out: Tensor = self.score((states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True))[:, 0]
        return out


_JUDGES: dict[Any, Judge] = {}
"""The last ones: no judge depends on what was served, and their seed is fixed, so the order of requests does not matter."""


def judge_of(seen: ServiceObservation, tables: Tables, count: int, epochs: int, tried: int) -> Judge:
    """A judge that learned from reference text and the same with each token replaced by one of its nearest."""
    key = (seen.reference_text[:count], fingerprint(seen.public), epochs, tried)
    if key not in _JUDGES:
        while len(_JUDGES) >= KEPT_JUDGES:
            del _JUDGES[next(iter(_JUDGES))]
        _JUDGES[key] = _trained(seen.public, seen.vocabulary, seen.reference_text[:count], tables, epochs, tried)
    return _JUDGES[key]


def _trained(
    model: nn.Module, words: Vocabulary, reference: Sequence[str], tables: Tables, epochs: int, tried: int
) -> Judge:
    texts = [ids for t in reference if 0 < len(ids := words.encode(t)) <= LONGEST]
    if not texts:
        raise NotApplicable(f"no reference text has 1 to {LONGEST} tokens to learn from")
    used = torch.tensor(sorted({i for t in texts for i in t}))
    near = dict(zip(used.tolist(), tables.usable[_near(tables, used, tried)].tolist()))
    rng = generator(0, "judge")
    with seeded(child(rng)), torch.enable_grad():
        judge = Judge(model, words.pad_id or 0).eval()
        optimizer = torch.optim.AdamW(judge.parameters(), lr=1e-4)
        for _ in range(epochs):
            for some in torch.split(torch.randperm(len(texts), generator=rng), BATCH // 2):
                good = [texts[n] for n in some.tolist()]
                draws = torch.randint(0, tried, (sum(map(len, good)),), generator=rng).tolist()
                bad = [[near[i][draws.pop()] for i in t] for t in good]
                wrapped = [[*words.prefix, *t, *words.suffix] for t in good + bad]
                wanted = torch.tensor([1.0] * len(good) + [0.0] * len(bad))
                loss = nn.functional.binary_cross_entropy_with_logits(judge(wrapped), wanted)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return judge.requires_grad_(False)


def _near(tables: Tables, used: Tensor, tried: int) -> Tensor:
    public = tables.public[tables.usable]
    found = [cosines(tables.public[some], public).topk(tried, dim=1).indices for some in torch.split(used, 256)]
    return torch.cat(found)


@torch.no_grad()
def judged(
    text: Sequence[int], options: Mapping[int, Sequence[int]], judge: Judge, beam: int, special: frozenset[int]
) -> list[int]:
    """The best text of ``options`` by the judge, found by replacing one token at a time in the ``beam`` best texts so far.

    The judge learned whole texts, so unlike a beam that grows from the left all that it scores are whole: it starts at the
    nearest tokens and sweeps once.
    """
    beams = [[i if i in special else options[i][0] for i in text]]
    for place, i in enumerate(text):
        if i in special:
            continue
        tried = [[*t[:place], token, *t[place + 1 :]] for t in beams for token in options[i]]
        unique = list(map(list, dict.fromkeys(map(tuple, tried))))
        order = judge(unique).argsort(descending=True, stable=True).tolist()
        beams = [unique[n] for n in order[:beam]]
    return beams[0]


SPEC = ServiceAttackSpec(
    name="sda",
    about="deciphers ids as a substitution cipher, scored by a trained model",
    source="ObfusLM, sec. 5.2 and app. E",
    make=SubstitutionDecipherment,
)
