"""An obfuscated copy of a model and its secrets (ObfusLM, sec. 4.2 and 4.4)."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.core.rng import Randomness, permutation, secret_generator
from rasura.service_protections.obfuslm.clusters import Clusters, embed_cluster
from rasura.service_protections.obfuslm.named import named_ids
from rasura.service_protections.obfuslm.residual import change_stream, check_stream, model_head
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.service_protections.obfuslm.synthesis import calibrated_synth, weight_synth
from rasura.victims.models import layer_output, parts


@dataclass(frozen=True)
class Obfuscated:
    """``model`` is for the server. ``tokens`` ``(vocabulary,)`` int64 is secret: the row of each token, and so its id, at
    the server.

    ``hidden``: how many ids are secret. ``clusters``, ``merged``: how many clusters there are, and how many rows stood in
    ones that were too small.
    """

    model: nn.Module
    tokens: Tensor
    hidden: int
    clusters: int
    merged: int

    def __repr__(self) -> str:
        return f"Obfuscated({type(self.model).__name__}, {self.clusters} clusters)"


@torch.no_grad()
def obfuscate(
    model: nn.Module,
    settings: ObfuscationSettings,
    fixed: Collection[int],
    rng: Randomness | None = None,
    *,
    in_place: bool = False,
) -> Obfuscated:
    """A copy of ``model`` whose tokens have other ids, and rows mixed with those of their cluster.

    The ids ``fixed`` (special tokens, and ids that no text can have) keep their place and their row, and so do those that
    the model's configurations name (``named_ids``): a server needs to know which id pads and which ends a text, and neither
    is private. The clusters are formed in the permuted order, since the order decides which row begins one. A head shares
    the permutation and the weights, its bias too; a tied one stays tied. Classifier heads are as they were. ``in_place``
    changes ``model`` itself, for large ones. Randomness from the operating system unless ``rng`` is given, which is for
    experiments. Raises ``InputError`` for settings that the model's size does not allow, and for a model that looks tokens
    up in a second table.
    """
    fixed = {*fixed, *named_ids(model)}
    rows = range(len(model.get_parameter(parts(model).word_embedding)))
    some = list(islice((i for i in rows if i not in fixed), 8))
    if second := _token_tables(model, some):
        raise InputError(
            f"{type(model).__name__} looks tokens up in {second[0]} as well, whose rows would keep the public order; "
            "ObfusLM knows models with one table of tokens"
        )
    made = model if in_place else copy.deepcopy(model)
    if settings.plus:
        check_stream(made, torch.tensor([some], device=next(made.parameters()).device))
    known = parts(made)
    table = made.get_submodule(known.word_embedding.rsplit(".", 1)[0]).weight
    assert isinstance(table, Tensor)
    rng = rng or secret_generator()
    head = model_head(made)
    others = [] if head is None else [p for p in head.parameters() if p is not table and len(p) == len(table)]
    tokens, hidden, clusters = _hide_tokens(table, others, settings, fixed, rng)
    if settings.plus:
        _hide_dimensions(made, table, settings, rng)
    return Obfuscated(made, tokens, hidden, len(clusters), clusters.merged)


@torch.no_grad()
def obfuscate_embedding(
    embedding: nn.Embedding, settings: ObfuscationSettings, fixed: Collection[int] = (), rng: Randomness | None = None
) -> Obfuscated:
    """Obfuscate one table of vectors with ObfusLM: a copy with its rows permuted and mixed, for a network of any kind that
    begins with it, such as an LSTM on word vectors (ObfusLM, appendix D.5).

    ``fixed`` rows (padding, unknown words) keep their place. Randomness as for ``obfuscate``. For a language model with all
    that its server needs there is ``obfuscate_model``. Raises ``InputError`` for ObfusLM+, which needs the whole network,
    and for values that are not finite.
    """
    if settings.plus:
        raise InputError("ObfusLM+ changes a whole model; pass settings with plus=False for an embedding alone")
    made = copy.deepcopy(embedding)
    tokens, hidden, clusters = _hide_tokens(made.weight, (), settings, fixed, rng or secret_generator())
    return Obfuscated(made, tokens, hidden, len(clusters), clusters.merged)


def _token_tables(model: nn.Module, words: Sequence[int]) -> list[str]:
    """The modules that look tokens up in a table other than the word embedding's, as in Gemma 3n: for the ordinary tokens
    ``words`` in another order, something else leaves them. BART's position embedding is given tokens, and only counts them.
    """
    table = model.get_parameter(parts(model).word_embedding)
    ids = torch.tensor([list(words)], device=table.device)

    def out(name: str, text: Tensor) -> Tensor | None:
        return layer_output(model, name, input_ids=text, attention_mask=torch.ones_like(text))

    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight.data_ptr() != table.data_ptr():
            one, other = out(name, ids), out(name, ids.flip(1))
            if one is not None and other is not None and not torch.equal(one, other):
                found.append(name)
    return found


def _hide_tokens(
    table: Tensor, others: Sequence[Tensor], settings: ObfuscationSettings, fixed: Collection[int], rng: Randomness
) -> tuple[Tensor, int, Clusters]:
    """Permute and mix the rows of ``table`` in place, and those of ``others`` (a head, its bias) alike; where each went, and
    how many were to be hidden."""
    if not all(bool(p.isfinite().all()) for p in (table, *others)):
        raise InputError("the table of tokens holds NaN or infinite values, and cannot be mixed; correct them first")
    kept = torch.zeros(len(table), dtype=torch.bool)
    kept[[i for i in fixed if 0 <= i < len(table)]] = True
    movable = (~kept).nonzero().flatten()
    if settings.k > len(movable):
        raise InputError(
            f"clusters of {settings.k} tokens, but the vocabulary has only {len(movable)} to hide; pass a smaller k"
        )
    tokens = torch.arange(len(table))
    tokens[movable] = movable[permutation(len(movable), rng)]
    source = tokens.argsort()
    stated = [table, *others]
    for parameter in stated:
        parameter.copy_(parameter[source.to(parameter.device)])
    clusters = embed_cluster(
        table[movable], settings.k, settings.beta, disjoint=settings.disjoint, merge_leftovers=settings.merge_leftovers
    )
    if settings.calibrated:
        # The first id of a cluster is the row that began it, which is in the middle of the others. A new order hides it.
        shuffled = _within(clusters, rng)
        for parameter in stated:
            parameter[movable] = parameter[movable[shuffled]]
        source[movable] = source[movable[shuffled]]
        tokens = source.argsort()
    if settings.k > 1:
        synth = calibrated_synth if settings.calibrated else weight_synth
        weights = synth(table[movable], clusters, settings.epsilon, rng)
        for parameter in stated:
            parameter[movable] = weights.apply(parameter[movable])
    return tokens, len(movable), clusters


def _within(clusters: Clusters, rng: Randomness) -> Tensor:
    """An order of all rows that is random within each cluster: the old place of each."""
    order = torch.empty_like(clusters.members)
    for number in range(len(clusters)):
        members = clusters[number]
        order[members] = members[permutation(len(members), rng)]
    return order


def _hide_dimensions(model: nn.Module, table: Tensor, settings: ObfuscationSettings, rng: Randomness) -> None:
    columns = table.detach().T
    if settings.hidden_k > len(columns):
        raise InputError(
            f"clusters of {settings.hidden_k} dimensions, but the model has only {len(columns)}; pass a smaller hidden_k"
        )
    clusters: Clusters = embed_cluster(columns, settings.hidden_k, settings.beta)
    weights = weight_synth(columns, clusters, settings.hidden_epsilon, rng) if settings.hidden_k > 1 else None
    order = permutation(len(columns), rng)
    # The table itself is among the weights that change: the mixing is settled before the first of them does.
    change_stream(model, lambda x: (weights.apply(x) if weights is not None else x)[order])
