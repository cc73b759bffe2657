"""``rasura audit --service``: what the operator of a model service can recover from the clients' data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rasura.cli.outcome import Ending, conclude
from rasura.cli.shared import err, watched
from rasura.core.errors import InputError

FIELDS = {"defenses": "protections"}
"""Options that are called differently in a ``ServicePlan``."""

OPTIONS = {"texts": "text", "updates": "update", "threats": "threat", "batch_sizes": "batch-size"}
"""Options that are called differently in a ``Plan``."""

if TYPE_CHECKING:
    from rasura.runs.service_plan import ServicePlan
    from rasura.runs.training import Training


def serve_and_read(
    plan: ServicePlan,
    folder: Path,
    training: Training | None = None,
    *,
    baseline: bool = True,
    fail_above: float | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run ``plan`` into ``folder``: the identity of the run, and all its records. ``baseline``: as in ``ServiceAudit``."""
    from rasura.core.run_store import RunStore
    from rasura.runs.services import ServiceAudit

    with err.status("loading the model and the texts"):
        prepared = ServiceAudit(plan, training, baseline=baseline)
        store = RunStore(folder, prepared.identity)
    if fail_above is not None:
        store.describe({"fail_above": fail_above})
    done = sum(cell.key in store for cell in prepared.cells)
    with watched(close=store.close) as bar:
        line = bar.add_task("", total=len(prepared.cells), completed=done)
        for _ in prepared.run(store, lambda c: bar.update(line, description=f"{c.attack} / {c.protection}")):
            bar.advance(line)
        return prepared.identity, list(store)


def service_planned(config: Path | None, given: Mapping[str, Any]) -> ServicePlan:
    """The plan of a TOML file, if any, with the options ``given`` on the command line. Refuses options that a service does
    not have.
    """
    from dataclasses import fields

    from rasura.runs.fields import toml
    from rasura.runs.service_plan import ServicePlan, service_plan_of

    found = toml(config, "a TOML file with the fields of a plan for a service") if config else {}
    names = {f.name for f in fields(ServicePlan)}
    for name, value in given.items():
        if FIELDS.get(name, name) not in names:
            raise InputError(f"--{OPTIONS.get(name, name).replace('_', '-')} cannot be used with --service; remove it")
        found[FIELDS.get(name, name)] = value
    if "data" not in found:
        raise InputError("--service needs FILE, the texts that clients send")
    if "reference" not in found:
        raise InputError("--service needs --reference, a file with other texts of the same kind")
    return service_plan_of(found, str(config or "--service")).checked()


def run_service_audit(plan: ServicePlan, folder: Path, ending: Ending) -> None:
    """Run ``plan`` into ``folder``, print the results, and exit as ``ending`` says."""
    identity, records = serve_and_read(plan, folder, fail_above=ending.fail_above)
    conclude(records, identity, folder, ending)
