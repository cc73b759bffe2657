"""The strategy inside Flower's wrappers for differential privacy, whose noise fits an average of the clients alone.

Every other aggregation may move further for one client: an adaptive server divides by what it saw, and a median jumps.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rasura.accounting.configurations.scopes import Scopes
from rasura.accounting.configurations.trainings import argument

AVERAGES = ("FedAvg", "FedProx")
_ARGUMENTS = (
    "fraction_train", "fraction_evaluate", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes", "weighted_by_key",
    "arrayrecord_key", "configrecord_key", "train_metrics_aggr_fn", "evaluate_metrics_aggr_fn", "proximal_mu",
    "fraction_fit", "min_fit_clients", "min_evaluate_clients", "min_available_clients", "evaluate_fn", "on_fit_config_fn",
    "on_evaluate_config_fn", "accept_failures", "initial_parameters", "fit_metrics_aggregation_fn",
    "evaluate_metrics_aggregation_fn", "inplace",
)  # fmt: skip
"""The arguments of ``FedAvg`` and ``FedProx`` (flwr 1.42), none of which changes that replies are averaged."""


def not_averaging(scopes: Scopes, node: ast.Call) -> Iterator[tuple[ast.AST, str]]:
    """Why it is not known that the strategy that ``node`` wraps takes the average of the clients; nothing if it does."""
    given = argument(node, "strategy", 0)
    variable = None if given is None else scopes.read(given)
    made = given if variable is None else scopes.assigned(variable)
    if not isinstance(made, ast.Call) or scopes.original(made.func) not in AVERAGES or scopes.library(made.func) != "flwr":
        shown = "a strategy that is not written here" if given is None else ast.unparse(made or given)[:60]
        yield (
            node,
            f"the noise fits the average of FedAvg or FedProx of flwr, made once in this file; {shown} is wrapped",
        )
        return
    if strange := [one.arg for one in made.keywords if one.arg not in _ARGUMENTS]:
        yield made, f"{ast.unparse(made.func)} has arguments that are not known here: {', '.join(map(str, strange))}"
    for one in scopes.loads.get(variable, []) if variable is not None else ():
        if one is not given:
            yield one, f"{one.id} is used beside the wrapper, and may be changed"
