"""The help of the commands: options in panels, each with the value that it has unless it is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from inspect import unwrap
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo

COLUMNS = ("text_column", "pair_column", "label_column")

PANELS: Mapping[str, tuple[str, ...]] = {
    "Input": (
        "file", "data", "text", "updates", "watch", "source", "model", "task", "members", "non_members", "rows",
        "batch_size", "limit", "config", "num_labels", "truncate", "max_length", "labels", "lengths", "dropout",
        "frozen_embeddings", "how", "update", "before", "before_round", "names_from", "hidden", "allow_pickle", "train",
        "public", "test", "train_limit", "holdout", "target", *COLUMNS,
    ),
    "Adversary": (
        "threat", "attack", "reference", "language_model", "budget", "max_memory", "entries", "candidates",
        "simulated_rounds", "base", "shadow_models", "fpr",
    ),
    "Protections": (
        "defense", "suite", "risk", "at_most", "steps", "utility", "delta", "epsilon", "target_epsilon", "seeded_noise",
        "gradient_canaries", "k",
        "overlap", "group", "beam", "keep_punctuation", "keep_numbers", "round_trip", "language", "table",
    ),
    "Training": (
        "epochs", "patience", "keep", "learning_rate", "train_batch_size", "schedule", "warmup", "optimizer", "lora",
        "targets", "adapter_dropout", "precision", "physical_batch_size",
    ),
    "Clients and rounds": (
        "examples", "clients", "clients_per_round", "rounds", "rounds_per_client", "sampling", "weights", "aggregation",
        "parameters", "version",
    ),
    "Statement": ("unit", "per"),
    "Run": ("seeds", "seed", "keys", "device", "engine", "address", "workers", "cells"),
    "Output": ("folder", "fail_above", "junit", "sarif", "mlflow", "wandb", "show_text", "results", "dpia",
        "report_language", "as_json"),
}  # fmt: skip
"""The panels in the order of the help, each with its parameters."""

MOVED: Mapping[str, Mapping[str, str]] = {
    "audit": {"service": "Input", "clients": "Input"},
    "train": {"service": "Protections", "batch_size": "Training", "update": "Training", "unit": "Protections"},
    "membership": {"batch_size": "Training"},
    "serve": {"max_memory": "Run"},
    "diagnose": {"batch_size": "Training", "examples": "Training", "texts": "Input"},
    "check-dp": {
        "batch_size": "Clients and rounds",
        "epochs": "Clients and rounds",
        "epsilon": "Statement",
        "delta": "Statement",
        "model": "Adversary",
        "data": "Adversary",
        "limit": "Adversary",
    },
}
"""Parameters that mean something else in one command."""

UNSET: Mapping[str, str] = {
    "file": "fictional notes", "text": "the texts of FILE", "watch": "read once", "reference": "none",
    "language_model": "none", "model": "minilm", "entries": "set by --budget", "suite": "none", "config": "none",
    "num_labels": "as many as the head has, or as the labels need", "fail_above": "no limit",
    "address": "a cluster on this machine",
    "workers": "as many as there are cores", "max_length": "the model's", "limit": "all", "delta": "0.1 / examples",
    "labels": "estimated", "lengths": "estimated", "before": "UPDATE holds gradients or differences",
    "before_round": "none", "names_from": "none", "hidden": "none", "candidates": "none",
    "test": "the texts held out", "update": "set by the options of this panel", "non_members": "the rows held out",
    "rows": "all rows of --members", "fpr": "0.01 and 0.001 where n is large enough", "epsilon": "none", "dpia": "none",
    "target_epsilon": "none", "clients": "single updates", "physical_batch_size": "the whole batch",
    "utility": "none", "train": "FILE", "train_limit": "all", "k": "70", "overlap": "0.1", "group": "1",
    "task": "as the model folder states", "language": "en", "table": "none", "data": "the study's", "seeds": "the study's",
    **dict.fromkeys(COLUMNS, "recognised by its name"), **dict.fromkeys(("junit", "sarif", "mlflow", "wandb"), "none"),
}  # fmt: skip
"""What holds for an option that is not given and has no value in the code of its command."""

UNSET_IN: Mapping[str, Mapping[str, str]] = {
    "audit": {
        "model": "minilm; for images lenet", "attack": "blind, embedding-rows, span, best",
        "defense": "none, frozen-embeddings+dropout:0.1, frozen-blocks:1, pruning:0.9, gaussian:0.001", "update": "fedsgd",
        "threat": "honest-server", "batch_size": "1", "limit": "4, or all of --text; with --service 64", "seeds": "1",
        "seed": "0", "keys": "1", "budget": "default; with --service quick", "max_memory": "4096",
    },
    "read": {"batch_size": "estimated", "how": "a gradient, or one step", "updates": "those of --watch"},
    "calibrate": {
        "attack": "embedding-rows, span and those that know the protections", "risk": "rougeL; for images ssim",
        "limit": "8, or all of --text", "test": "a part of --train",
    },
    "membership": {
        "attack": "the usual ones of the task", "num_labels": "as the model folder states", "reference": "none",
        "base": "an adapter's own, or the one that --rows name", "epochs": "those of --rows, or 5",
        "batch_size": "that of --rows, or 32", "learning_rate": "that of --rows, or 1e-4",
        "optimizer": "that of --rows, or adamw",
    },
    "train": {"unit": "each text by itself"},
    "reproduce": {
        "attack": "all", "defense": "all", **dict.fromkeys(("data", "model", "reference"), "where the run had it"),
    },
    "study": {
        "model": "the study's", "limit": "the study's", "budget": "the study's", "attack": "the study's",
        "batch_size": "the study's", "defense": "the study's", "folder": "runs/studies/NAME",
    },
    "check-dp": {
        **dict.fromkeys(("examples", "clients", "rounds", "batch_size", "epochs", "parameters", "version"), "not known"),
        "clients_per_round": "as the noise assumes", "rounds_per_client": "all", "sampling": "that of the framework",
        "weights": "not known", "aggregation": "not known", "epsilon": "that of the files", "delta": "that of the files",
        "unit": "the mechanism's", "model": "no attack", "data": "no attack",
    },
    "bundle": {"file": "bundle.json in the folder"},
}  # fmt: skip
"""The same for single commands, in place of ``UNSET``."""


class Panelled(TyperCommand):
    """A command whose help has ``PANELS`` and shows ``UNSET``."""

    def __init__(self, name: str | None, **options: Any) -> None:
        super().__init__(name, **options)
        command = name or ""
        panels = {one: panel for panel, names in PANELS.items() for one in names} | dict(MOVED.get(command, {}))
        unset = {**UNSET, **UNSET_IN.get(command, {})}
        given: list[Any] = list(self.params)
        told = _told_of(options.get("callback"))
        for parameter in given:
            parameter.help = parameter.help or told.get(parameter.name)  # typer 0.20 loses it beside click 8.5
            parameter.rich_help_panel = panels.get(parameter.name, parameter.rich_help_panel)
            if parameter.default is None and not parameter.required and parameter.name in unset:
                parameter.show_default = unset[parameter.name]
        order = [*PANELS]
        self.params.sort(key=lambda p: _place(p, panels, order))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does, but an option with one value that is given twice is refused: only its last value would count."""
        given: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        for parameter, times in Counter(p for p in given if p.param_type_name == "option").items():
            if times > 1 and not parameter.multiple and not parameter.is_flag:
                together = ", with its values separated by commas" if "commas" in (parameter.help or "") else ""
                ctx.fail(f"{parameter.opts[0]} is given {times} times; give it once{together}")
        return super().parse_args(ctx, args)


def _told_of(function: Any) -> dict[str, str]:
    """The help of each argument of a command's function, by name."""
    known = get_type_hints(unwrap(function), include_extras=True) if function is not None else {}
    said = ((name, about) for name, one in known.items() for about in getattr(one, "__metadata__", ()))
    return {name: about.help for name, about in said if isinstance(about, ArgumentInfo) and about.help}


def _place(parameter: Any, panels: Mapping[str, str], order: list[str]) -> int:
    """Where a parameter stands in the help. Arguments keep their order, which is that of the words on the command line."""
    if parameter.param_type_name == "argument":
        return -1
    return order.index(panels[parameter.name]) if parameter.name in panels else len(order)


def panelled(app: typer.Typer) -> None:
    """Give all commands of ``app``, also those in groups, a help in panels."""
    for command in app.registered_commands:
        command.cls = Panelled
    for group in app.registered_groups:
        if group.typer_instance is not None:
            panelled(group.typer_instance)
