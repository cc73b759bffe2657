"""Matching of tensors to parameters: names with the prefixes of frameworks, and lists without names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rasura.core.interfaces import InputError
from rasura.core.options import known
from rasura.runs.update_files.entries import Entry, Source

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
"""What DDP, torch.compile, FSDP, activation checkpointing and PEFT insert between the parts of a name."""

ADAPTED = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "modules_to_save"})
"""After these, PEFT puts the adapter's name, which its files leave out."""

MAGNITUDE = "lora_magnitude_vector"
"""DoRA's lengths of a layer's rows."""

COUNTED = frozenset({"position_ids", "inv_freq", "num_batches_tracked", "masked_bias"})
"""Buffers in older state dicts. They are constants."""

HEADS = frozenset(
    {
        "classifier", "cls", "discriminator_predictions", "generator_lm_head", "generator_predictions", "lm_head",
        "lm_predictions", "predictions", "qa_outputs", "score", "sop_classifier", "vocab_layer_norm", "vocab_projector",
        "vocab_transform",
    }
)  # fmt: skip
"""What Hugging Face models call the heads of their tasks."""


@dataclass(frozen=True)
class Matched:
    """Tensors by parameter; ``notes``: how their names were changed, for people."""

    entries: Mapping[str, Entry]
    notes: tuple[str, ...]


def plain(name: str) -> str:
    """``name`` without the parts that wrappers and adapters insert."""
    out: list[str] = []
    parts = iter(name.split("."))
    for part in parts:
        if part in WRAPPERS:
            continue
        if part == MAGNITUDE:  # PEFT's files end with it, its models do not
            return ".".join([*out, part])
        if part in ADAPTED:
            out += [part] if part != "modules_to_save" else []
            adapter = next(parts, None)
            out += [adapter] if adapter in ("weight", "bias") else []
            continue
        out.append(part)
    return ".".join(out)


def matched(source: Source, model: nn.Module) -> Matched:
    """The entries of ``source`` by the parameter of ``model`` that each belongs to.

    Prefixes that all names share are removed or added. Buffers are left out. Raises ``InputError`` for a name that fits no
    parameter, and for two tensors that fit the same parameter.
    """
    pairs, notes = targets(source, model)
    out, copies = _once(source, model, pairs)
    if not out:
        raise InputError(f"{source.file} holds no parameter of the model; pass the model that the update was computed with")
    count = sum(1 for _ in model.parameters())
    replaced = sum(_replaced(entry.name or "") for entry in source.entries)
    left = len(source.entries) - sum(target is not None for target in pairs) - replaced
    told = [f"{source.file.name}: {source.kind}, {len(out)} of the model's {count} parameters"]
    told += [f"{left} buffers were left out"] if left else []
    told += [f"weights that an adapter trains a copy of were left out: {replaced}"] if replaced else []
    return Matched(out, (*told, *copies, *notes))


def _replaced(name: str) -> bool:
    """Whether a tensor is of a layer in whose place a copy runs, which an adapter trains (``modules_to_save``)."""
    return "original_module" in name.split(".")


def _once(source: Source, model: nn.Module, pairs: Sequence[str | None]) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """The entries of ``source`` by the parameter in ``pairs`` (None: left out), each parameter once; and the copies that
    were left out, for people.

    Tied parameters stand in a state dict under each of their names. Raises ``InputError`` for two tensors of one parameter
    that are not such copies: under one name, or with other numbers.
    """
    out: dict[str, Entry] = {}
    copies = 0
    for place, (entry, target) in enumerate(zip(source.entries, pairs, strict=True)):
        if target is None:
            continue
        first = out.setdefault(target, entry)
        if first is entry:
            continue
        shape = tuple(model.get_parameter(target).shape)
        own = entry.name is None or plain(first.name or "") != plain(entry.name)
        if not own or not first.shape == entry.shape == shape or not torch.equal(first.read(), entry.read()):
            what = f"array {place}" if entry.name is None else entry.name
            raise InputError(f"{source.file}: {what} and another tensor belong to the same parameter {target}")
        copies += 1
    return out, (f"copies of tied parameters left out: {copies}",) if copies else ()


def targets(source: Source, model: nn.Module) -> tuple[list[str | None], tuple[str, ...]]:
    """The parameter of each entry, None for buffers; and how the names were changed, for people.

    Raises ``InputError`` for a name without a match in the model.
    """
    own, several = _own(model)
    names = [plain(entry.name or "") for entry in source.entries]
    off, on = _shift([name for name in names if not _replaced(name)], own, source)
    buffers = {plain(n) for n, _ in model.named_buffers()}
    out: list[str | None] = []
    for name, entry in zip(names, source.entries):
        if _replaced(name):
            out.append(None)
            continue
        short = on + name.removeprefix(off)
        target = own.get(short) if name.startswith(off) else None
        if target is not None and short in several:
            target = _named(str(entry.name), on + str(entry.name).removeprefix(off), several[short], source)
        if target is None and short not in buffers and name.rsplit(".", 1)[-1] not in COUNTED:
            raise InputError(_unknown(str(entry.name), source, model))
        out.append(target)
    changes = [f"the prefix {off!r} was removed"] * bool(off) + [f"the prefix {on!r} was added"] * bool(on)
    changes += next(([f"{e.name} was matched to {n}"] for e, n in zip(source.entries, out) if n and e.name != n), [])
    return out, (f"names: {'; '.join(changes)}",) if changes else ()


def _named(name: str, whole: str, adapters: Sequence[str], source: Source) -> str:
    """The one of ``adapters`` whose name is ``whole``. Raises ``InputError`` if the file does not say which."""
    if whole in adapters:
        return whole
    raise InputError(
        f"{source.file}: {name[:200]} fits several adapters of the model ({', '.join(adapters)}); pass a model with "
        "the adapter of the update alone"
    )


def _own(model: nn.Module) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The model's parameters by plain name; tied parameters under each of their names. And those that share a plain name, as
    those of several adapters do."""
    first = {id(p): n for n, p in model.named_parameters()}
    out: dict[str, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        # The copy that an adapter trains is the parameter; what it replaces is not.
        if not _replaced(name) and first[id(p)] not in out.setdefault(plain(name), []):
            out[plain(name)].append(first[id(p)])
    return {n: found[0] for n, found in out.items()}, {n: found for n, found in out.items() if len(found) > 1}


def _shift(names: Sequence[str], own: Mapping[str, str], source: Source) -> tuple[str, str]:
    """The prefix to remove from all names and the prefix to add, so that the largest number of names fit a parameter."""
    fitting: Counter[tuple[str, str]] = Counter()
    ends: dict[str, list[str]] = {}
    for target in own:
        for prefix, rest in _cuts(target):
            ends.setdefault(rest, []).append(prefix)
    for name in names:
        fitting[("", "")] += name in own
        for prefix, rest in _cuts(name):
            fitting[(prefix, "")] += rest in own
        for prefix in ends.get(name, ()):
            fitting[("", prefix)] += 1
    most = max(fitting.values(), default=0)
    best = [shift for shift, count in fitting.items() if count == most]
    if ("", "") in best:
        return "", ""
    if len(best) > 1:
        raise InputError(
            f"{source.file}: {names[0]} matches {len(best)} parameters of the model; expected the names of the "
            "model's parameters, with one common prefix"
        )
    return best[0]


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Every way to cut a name at a dot: the prefix with its dot, and the rest."""
    place = name.find(".")
    while place >= 0:
        yield name[: place + 1], name[place + 1 :]
        place = name.find(".", place + 1)


def _unknown(name: str, source: Source, model: nn.Module) -> str:
    if "lora_" in name and not any("lora_" in n for n, _ in model.named_parameters()):
        return (
            f"{source.file} holds LoRA weights ({name[:100]}), but the model has no adapter; pass the folder of "
            "the previous round's adapter as --before or --model"
        )
    own = {part for n, _ in model.named_parameters() for part in n.split(".")}
    if head := next((part for part in name.split(".") if part in HEADS - own), None):
        return (
            f"{source.file} holds {name[:200]}, of a head that the model does not have, such as that of another task; leave "
            f"the tensors of {head} out of the file to read the others"
        )
    try:
        known(f"parameter in {source.file.name}", name[:200], [n for n, _ in model.named_parameters()])
    except InputError as error:
        return str(error)
    return f"{source.file}: {name[:200]} has another prefix than the other names; expected one prefix for all"


def listed(source: Source, model: nn.Module, names: Sequence[str | None] | None) -> Matched:
    """A list without names, matched to the model's parameters.

    ``names``: the parameters of the list in its order, None for a buffer; without them, the orders that frameworks use are
    tried by number and shapes. Raises ``InputError`` if none or several fit.
    """
    shapes = [entry.shape for entry in source.entries]
    held = {n: tuple(p.shape) for n, p in model.named_parameters()}
    orders = {"--names-from": tuple(names)} if names is not None else usual_orders(model)
    fitting = {
        label: order
        for label, order in orders.items()
        if len(order) == len(shapes) and all(n is None or held[n] == shape for n, shape in zip(order, shapes))
    }
    if not fitting:
        counts = ", ".join(f"{len(order)} ({label})" for label, order in orders.items())
        raise InputError(
            f"{source.file} is a list of {len(shapes)} arrays without names, and their shapes fit no known "
            f"order: {counts}; pass the adapter or model whose weights it holds as --names-from"
        )
    if len(set(fitting.values())) > 1:
        raise InputError(
            f"{source.file} is a list without names that fits several orders ({', '.join(fitting)}); pass the "
            "adapter or model whose weights it holds as --names-from"
        )
    label, order = next(iter(fitting.items()))
    entries, copies = _once(source, model, order)
    told = f"{source.file.name}: {source.kind}, a list of {len(shapes)} without names"
    return Matched(entries, (told, *copies, f"order of the list: {label}"))


def usual_orders(model: nn.Module) -> dict[str, tuple[str | None, ...]]:
    """The orders in which frameworks send a model's weights without names: lists of parameters, None for a buffer."""
    first = {id(p): n for n, p in model.named_parameters()}
    state = [(n, first.get(id(t))) for n, t in model.state_dict(keep_vars=True).items()]
    tuned = [p for n, p in state if "lora_" in n]
    saved = [p for n, p in state if ".modules_to_save." in n]
    trainable = tuple(n for n, p in model.named_parameters() if p.requires_grad)
    out: dict[str, tuple[str | None, ...]] = {"the adapter's weights, as PEFT lists them": (*tuned, *saved)} if tuned else {}
    return {**out, "trainable parameters": trainable, "the state dict": tuple(p for _, p in state)}
