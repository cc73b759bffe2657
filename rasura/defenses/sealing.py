"""Selective encryption: the most sensitive entries leave the client encrypted, the others in the clear.

After "selective encryption" (sec. 4.1). The receiver can see which entries are sealed, so the message's ``visible`` masks
show it. Sealed entries are added homomorphically (``defenses.homomorphic``) or, with the scheme ``none``, only left out.
That is enough for an audit: what the clear entries reveal does not depend on the cipher.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError, Transform, made
from rasura.core.mechanisms import mechanism
from rasura.core.options import options
from rasura.core.rng import Randomness, generator
from rasura.core.specs import DefenseSpec, Strength
from rasura.core.values import Message, Parameter, Stage
from rasura.core.wire import mask_digest
from rasura.core.word_rows import output_layer
from rasura.defenses.homomorphic import seal
from rasura.defenses.homomorphic_keys import Context, Scheme, make_keys, parameters_for
from rasura.defenses.significance import NAMED, SCORED, named, scores
from rasura.defenses.structure import embedding_parameters
from rasura.defenses.sum_seen import check_sum, examples_of, seen_sum

Embeddings = Literal["counted", "sealed", "clear"]


@dataclass(frozen=True)
class Sealing:
    """What is sealed, and how.

    ``metric``: one of ``SCORED``, by which the fraction ``ratio`` of all entries is sealed, or of ``NAMED``, which names
    whole tensors (``ratio`` is then None). ``scope``: the largest of all entries together (as the paper's text implies), or
    of each ``tensor``. ``embeddings``: their entries are ``counted`` like others (as printed), or the whole table is
    ``sealed`` or left ``clear``. Positions of single sealed entries name the tokens of the batch; ``sealed`` leaves none,
    and seals the output layer of a language model too, whose rows belong to tokens as well. ``scheme``: ``bfv``, ``ckks``,
    ``secagg`` (secure aggregation, which federated rounds do; an audit shows the sum of a batch, one example a client), or
    ``none``.
    ``clients``: the number of clients in a sum, which the keys must fit. ``noise``: under secure aggregation, the deviation
    of the noise in the sum as a multiple of ``clip``, the largest norm of a client's update; 0 for none.
    """

    metric: str = "all"
    ratio: float | None = None
    scope: Literal["global", "tensor"] = "global"
    embeddings: Embeddings = "counted"
    scheme: Literal["none", "bfv", "ckks", "secagg"] = "none"
    clients: int = 4
    noise: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.metric not in (*SCORED, *NAMED):
            raise InputError(f"sealing: unknown significance {self.metric!r}; known: {', '.join((*SCORED, *NAMED))}")
        if (self.metric in SCORED) != (self.ratio is not None):
            needs = "a ratio: sealing:grad=0.1" if self.metric in SCORED else "no ratio: it names whole tensors"
            raise InputError(f"sealing: {self.metric} takes {needs}")
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise InputError(f"sealing: ratio is {self.ratio}; expected a fraction of the entries between 0 and 1")
        if not (0 <= self.noise < math.inf and 0 < self.clip < math.inf):
            raise InputError(f"sealing: noise {self.noise} and clip {self.clip}; expected at least 0, and above 0")
        if self.noise and (self.scheme != "secagg" or self.metric != "all" or self.embeddings == "clear"):
            raise InputError(
                "sealing: noise in the sum needs sealing:all/by=secagg, without embeddings=clear; clear entries have none"
            )
        if self.clip != Sealing.clip and not self.noise:
            raise InputError(f"sealing: clip={self.clip} clips nothing without noise in the sum; add noise= beside it")
        for name, value, known in (
            ("scope", self.scope, ("global", "tensor")),
            ("embeddings", self.embeddings, get_args(Embeddings)),
            ("scheme", self.scheme, ("none", "bfv", "ckks", "secagg")),
        ):
            if value not in known:
                raise InputError(f"sealing: {name} is {value!r}; expected {', '.join(known)}")


@dataclass
class Sealer:
    """The state: the model and inputs of the sealed step, and the keys, which are made at first use unless given."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    keys: Context | None = None
    beyond: int = 0
    scales: Mapping[str, float] = field(default_factory=dict)


def mask(
    settings: Sealing, model: nn.Module, gradients: Mapping[str, Tensor], inputs: Any, rng: Randomness
) -> dict[str, Tensor]:
    """True where an entry is sealed, by name and shape of ``gradients``."""
    if settings.metric in NAMED:
        chosen = named(settings.metric, model, gradients)
        found = {n: torch.full(g.shape, n in chosen) for n, g in gradients.items()}
    else:
        found = _largest(settings, scores(settings.metric, model, gradients, inputs, rng), _embedding_names(model))
    if settings.embeddings != "counted":
        for n in _embedding_names(model, settings.embeddings == "sealed") & set(gradients):
            found[n] = torch.full(gradients[n].shape, settings.embeddings == "sealed")
    return found


def _embedding_names(model: nn.Module, output: bool = False) -> set[str]:
    """The parameters of the embeddings; with those of the ``output`` layer of a language model, if wanted."""
    if not hasattr(model, "get_input_embeddings"):
        return set()  # an image classifier
    table = {id(p) for p in embedding_parameters(model)}
    layer = output_layer(model) if output else None
    table |= {id(p) for p in layer.parameters()} if layer is not None else set()
    return {n for n, p in model.named_parameters() if id(p) in table}


def _largest(settings: Sealing, found: Mapping[str, Tensor], embedding: set[str]) -> dict[str, Tensor]:
    """The fraction ``ratio`` of the entries, rounded up; ties are resolved in order. Embeddings are included if they are
    ``counted``. Raises ``InputError`` for scores that are not finite, which have no order."""
    ratio = settings.ratio or 0.0
    competing = [n for n in found if settings.embeddings == "counted" or n not in embedding]
    out = {n: torch.zeros(s.shape, dtype=torch.bool) for n, s in found.items()}
    for some in [competing] if settings.scope == "global" else [[n] for n in competing]:
        flat = torch.cat([found[n].reshape(-1) for n in some])
        if not bool(flat.isfinite().all()):
            raise InputError(f"sealing: {settings.metric} gives scores that are not finite, as gradients with NaN do")
        count = math.ceil(Fraction(repr(ratio)) * len(flat))
        chosen = torch.zeros(len(flat), dtype=torch.bool)
        if count:
            cut = flat.kthvalue(len(flat) - count + 1).values
            chosen = flat > cut
            ties = (flat == cut).nonzero().flatten()
            chosen[ties[: count - int(chosen.sum())]] = True
        for n, part in zip(some, torch.split(chosen, [found[n].numel() for n in some])):
            out[n] = part.reshape(found[n].shape)
    return out


def agreed_scales(gradients: Mapping[str, Tensor], margin: float = 2.0) -> dict[str, float]:
    """The largest absolute entry of each tensor times ``margin``. Clients agree on it from the previous aggregate, which all
    of them know. A tensor of zeros has scale 1. Raises ``InputError`` for entries that are not finite."""
    sizes = {n: margin * float(g.abs().max()) if g.numel() else 1.0 for n, g in gradients.items()}
    if bad := [n for n, s in sizes.items() if not math.isfinite(s)]:
        raise InputError(f"{bad[0]} has entries that are not finite, so no scale can be agreed on; nothing is sealed")
    return {n: s if s > 0 else 1.0 for n, s in sizes.items()}


AGREED = ("param", "random", *NAMED)
"""The metrics for a mask that several clients share: public weights, a public seed, or names of tensors."""


def agreed_mask(settings: Sealing, model: nn.Module, names: Iterable[str], seed: int = 0) -> dict[str, Tensor]:
    """The mask that anyone with the public ``model`` can compute: true where an entry of ``names`` is sealed.

    Raises ``InputError`` for a metric that depends on a client's own texts: such masks differ, so a server could not add the
    sealed entries, and the positions of the entries would reveal something about the texts.
    """
    if settings.metric not in AGREED:
        raise InputError(
            f"sealing:{settings.metric} depends on a client's own texts, so clients cannot agree on a mask; "
            f"expected one of {', '.join(AGREED)}"
        )
    parameters = dict(model.named_parameters())
    public = {n: parameters[n].detach().cpu() for n in names}
    return mask(settings, model, public, None, generator(seed, "agreed mask"))


def sealing(
    settings: Sealing,
    *,
    keys: Context | None = None,
    scales: Mapping[str, float] | None = None,
    agreed: Mapping[str, Tensor] | None = None,
) -> Transform[Message, Message, Sealer]:
    """Seal entries of a message.

    ``keys``: the clients' keys (a public context can also seal); if None and a scheme is named, new ones are made.
    ``scales``: agreed scales by name; without them, each tensor's own largest entry, which the receiver then learns. Values
    beyond are clipped and counted in the message's header (``beyond``). ``agreed``: the mask that all clients have, true
    where an entry is sealed; without it, a mask by ``settings``.
    """

    def init(known: tuple[nn.Module, Mapping[str, Tensor]]) -> Sealer:
        if settings.scheme == "secagg":
            whole = settings.metric == "all" and settings.embeddings != "clear"
            check_sum(whole, settings.noise, examples_of(known[1]))
        model, inputs = known
        return Sealer(model, inputs, keys, scales=scales or {})

    def apply(message: Message, state: Sealer, rng: Randomness) -> tuple[Message, Sealer]:
        if settings.scheme == "secagg":
            return seen_sum(message, examples_of(state.inputs), rng), state
        sealed = agreed or mask(settings, state.model, message.gradients, state.inputs, rng)
        visible = {
            n: ~hidden & message.visible[n] if n in message.visible else ~hidden for n, hidden in sealed.items()
        }  # fmt: skip
        clear = {n: g.masked_fill(sealed[n], 0) for n, g in message.gradients.items()}
        header: dict[str, Parameter] = {
            "mask": mask_digest({n: ~hidden for n, hidden in sealed.items()}),
            "scheme": settings.scheme,
        }
        ciphertexts: dict[str, bytes] = {}
        if settings.scheme == "bfv" or settings.scheme == "ckks":
            scheme: Scheme = settings.scheme
            state.keys = state.keys or make_keys(settings.clients, scheme)
            values, scale = flattened(message.gradients, sealed, state.scales or agreed_scales(message.gradients, 1.0))
            found, beyond = seal(values, scale, state.keys)
            ciphertexts = {f"{scheme}/{k:06d}": data for k, data in enumerate(found.ciphertexts)}
            header |= {"key": state.keys.key, "clients": found.clients, "sealed": len(values), "beyond": beyond}
            state.beyond += beyond
        return replace(
            message, gradients=clear, visible=visible, sealed=ciphertexts, header={**message.header, **header}
        ), state

    told: dict[str, Parameter] = {
        "metric": settings.metric, "ratio": settings.ratio, "scope": settings.scope, "embeddings": settings.embeddings,
        "scheme": settings.scheme,
    }  # fmt: skip
    if settings.scheme == "bfv" or settings.scheme == "ckks":
        budget = parameters_for(settings.clients, settings.scheme).noise_budget(settings.clients)
        told |= {} if budget is None else {"noise_budget_bits": round(budget, 1)}
    return made(Stage.WIRE, mechanism("sealing", told), init, apply)


def flattened(
    gradients: Mapping[str, Tensor], sealed: Mapping[str, Tensor], scales: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The sealed entries of all tensors in order, and the scale of each, both ``(n,)`` float64."""
    values = [g[sealed[n]].double().cpu().numpy() for n, g in gradients.items()]
    sizes = [np.full(len(v), scales[n]) for n, v in zip(gradients, values)]
    return np.concatenate([np.empty(0), *values]), np.concatenate([np.empty(0), *sizes])


def unflattened(total: np.ndarray, clear: Mapping[str, Tensor], visible: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The clear sums with the decrypted ``total`` ``(n,)`` at the entries that are not visible."""
    out, start = {}, 0
    for n, g in clear.items():
        hidden = ~visible[n] if n in visible else torch.zeros(g.shape, dtype=torch.bool)
        count = int(hidden.sum())
        part = torch.from_numpy(total[start : start + count]).to(g.dtype)
        out[n] = g.clone().masked_scatter_(hidden, part) if count else g
        start += count
    if start != len(total):
        raise InputError(f"{len(total)} values were decrypted, but the masks have room for {start}")
    return out


def described(text: str, **given: Any) -> Transform[Message, Message, Sealer]:
    """Sealing with options as text: ``all``, ``structural``, ``grad=0.1``, ``grad=0.1/embeddings=sealed/scheme=bfv``.

    ``given``: what ``sealing`` takes beside its settings.
    """
    return sealing(parsed(text), **given)


def parsed(text: str) -> Sealing:
    """The settings in ``text``."""
    first, _, rest = text.partition("/")
    metric, _, ratio = first.partition("=")
    usual = {f.name: f.default for f in fields(Sealing) if f.name not in ("metric", "ratio")}
    share = options("sealing", first, {metric: 0.1})[metric] if ratio else None
    found = options("sealing", rest, {**usual, "by": "bfv"})
    if "scheme" in found:
        found["scheme"] = found["scheme"] or "none"  # which ``options`` takes for no value
    if "by" in found:
        if "scheme" in found:
            raise InputError("sealing: by and scheme say the same; write one of them")
        if found["by"] not in BY:
            raise InputError(f"sealing: by is {found['by']!r}; expected {' or '.join(BY)}{WITHOUT.get(found['by'], '')}")
        found["scheme"] = found.pop("by")
    return Sealing(metric or "all", share, **found)


BY = ("secagg", "bfv")
"""What hides the entries of a federated round."""

WITHOUT = {
    "threshold": ". No library with threshold keys installs on Linux, macOS and Windows, so by=threshold does not exist; "
    "secagg needs no key that opens one update"
}


SPEC = DefenseSpec(
    name="sealing",
    about="encrypts the most sensitive entries: sealing:grad=0.1, sealing:structural, sealing:all",
    source="Selective encryption of gradients, sec. 4",
    make=described,
    example="sealing:grad=0.3",
    parameter=str,
    guarantee="security of the encryption scheme for the sealed entries; none for the others",
    known_by=("span", "mask-positions"),
    strength=Strength(name="fraction", weakest=0.01, strongest=1.0, points=5, keys=SCORED),
    draws=True,
)
