"""Files of settings: NVFlare's JSON, Python programs, and TOML with the same names."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rasura.accounting.configurations.facts import Call, Facts, Stated, Value
from rasura.accounting.configurations.nvflare import UNTRAINED, WITHOUT_NOISE
from rasura.accounting.configurations.programs import program
from rasura.core.errors import InputError


@dataclass(frozen=True)
class Contents:
    """What files say: calls, facts and a statement.

    ``doubts``: what was found and is not understood, so that no figure stands. ``assumed``: what the figures take for
    granted.
    """

    calls: tuple[Call, ...] = ()
    facts: Facts = field(default_factory=Facts)
    stated: Stated | None = None
    doubts: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def read_files(paths: Iterable[Path]) -> Contents:
    """Everything that the files say together. Raises ``InputError`` for unreadable files and for two statements."""
    found = Contents()
    for path in paths:
        one = _read(path)
        if found.stated is not None and one.stated is not None:
            raise InputError(f"{path}: a second [stated] table; expected one for all files")
        facts = agreeing(found.facts, one.facts, str(path), "another file says")
        doubts, assumed = found.doubts + one.doubts, found.assumed + one.assumed
        found = Contents(found.calls + one.calls, facts, found.stated or one.stated, doubts, assumed)
    return found


def agreeing(first: Facts, second: Facts, place: str, other: str) -> Facts:
    """The facts of both. Raises ``InputError`` where they contradict each other: ``place`` has the second."""
    for name, value in vars(second).items():
        before = getattr(first, name)
        if value not in (None, (), False) and before not in (None, (), False) and value != before:
            raise InputError(f"{place}: {name} is {value}, but {other} {before}")
    return first.over(second)


def _read(path: Path) -> Contents:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} could not be read: {type(error).__name__}") from None
    try:
        if path.suffix == ".toml":
            return _toml(tomllib.loads(text), path)
        if path.suffix == ".json":
            return _json(json.loads(text), path)
        if path.suffix == ".py":
            return _python(text, path)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, SyntaxError, RecursionError) as error:
        raise InputError(f"{path} is not valid {path.suffix[1:].upper()}: {str(error)[:120]}") from None
    raise InputError(f"{path}: expected a file .toml, .json or .py; convert other formats of NVFlare to JSON")


def _toml(found: Mapping[str, Value], path: Path) -> Contents:
    """``[run]``, ``[stated]``, and a table for each component: ``[flower.LocalDpMod]``, ``[opacus.make_private]``."""
    calls: list[Call] = []
    facts, stated = Facts(), None
    for name, table in found.items():
        if not isinstance(table, Mapping):
            raise InputError(f"{path}: {name} stands alone; expected tables such as [run] and [flower.LocalDpMod]")
        if name == "run":
            facts = Facts.read(table)
        elif name == "stated":
            stated = Stated.read(table)
        else:
            for part, arguments in table.items():
                each = arguments if isinstance(arguments, list) else [arguments]
                if not all(isinstance(one, Mapping) for one in each):
                    raise InputError(f"{path}: [{name}] has the value {part}; expected tables such as [{name}.LocalDpMod]")
                calls += [Call(part, dict(one), f"{path} [{name}.{part}]") for one in each]
    return Contents(tuple(calls), facts, stated)


def _python(text: str, path: Path) -> Contents:
    calls, found = program(text, str(path))
    facts = Facts.read({name: value for name, value in found.facts.items() if value is not None})
    return Contents(tuple(calls), facts, None, tuple(found.doubts), tuple(found.assumed))


def _json(found: Value, path: Path) -> Contents:
    """NVFlare's client or server configuration."""
    if not isinstance(found, Mapping) or not {"executors", "workflows", "task_result_filters"} & set(found):
        raise InputError(f"{path} is not a configuration of NVFlare; expected executors, workflows or task_result_filters")
    facts = Facts(rounds=_rounds(_tables(found.get("workflows"))))
    tasks = tuple(dict.fromkeys(task for one in _tables(found.get("executors")) for task in _names(one.get("tasks"))))
    calls = []
    for direction, key in (("result", "task_result_filters"), ("data", "task_data_filters")):
        for chain in _tables(found.get(key)):
            filters = [_filter(one, f"{path} [{key}]") for one in _tables(chain.get("filters"))]
            for one in filters:
                covered = _covered(found.get("task_result_filters"), one.name)
                listed = tasks or ("tasks that no executor lists",)
                open_tasks = () if "*" in covered else tuple(t for t in listed if t not in covered)
                submits = "submit_model" in tasks and "submit_model" not in open_tasks
                beside = tuple(o.name for o in filters if o.name not in (*WITHOUT_NOISE, one.name))
                extra = {"direction": direction, "unfiltered": open_tasks, "strange": beside, "submits": submits}
                extra["server"] = "workflows" in found
                calls.append(replace(one, extra=extra))
    return Contents(tuple(calls), facts)


def _rounds(workflows: Iterable[Mapping[str, Value]]) -> int | None:
    """The rounds of all workflows that train, one after another; None where the rounds of any are not written."""
    total = 0
    for one in workflows:
        arguments = one.get("args")
        rounds = arguments.get("num_rounds") if isinstance(arguments, Mapping) else None
        if isinstance(rounds, int) and not isinstance(rounds, bool) and rounds >= 0:
            total += rounds
        elif rounds is not None or _filter(one, "").name not in UNTRAINED:
            return None
    return total or None


def _covered(chains: Value, name: str) -> set[str]:
    """The tasks whose results pass a filter called ``name``."""
    return {
        task
        for chain in _tables(chains)
        if any(_filter(one, "").name == name for one in _tables(chain.get("filters")))
        for task in _names(chain.get("tasks"))
    }


def _filter(found: Mapping[str, Value], place: str) -> Call:
    name = str(found.get("path") or found.get("name") or "a filter without a name").rsplit(".", 1)[-1]
    arguments = found.get("args") or {}
    if not isinstance(arguments, Mapping):
        raise InputError(f"{place}: the args of {name} are not an object")
    return Call(name, dict(arguments), place)


def _tables(found: Value) -> list[Mapping[str, Value]]:
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _names(found: Value) -> list[str]:
    return [str(one) for one in found] if isinstance(found, list) else []
