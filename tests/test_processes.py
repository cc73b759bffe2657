"""An audit on several processes of this machine: the same Records as on one, and no cell that is lost in silence."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import comparable, model_folder, plan_for

from rasura.core.interfaces import InputError
from rasura.core.records import Record
from rasura.core.run_store import RunStore
from rasura.runs.audit import Audit, audit
from rasura.runs.cells import Cell
from rasura.runs.processes import Workers, fitting

__all__ = ["model_folder"]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.accelerator.is_available(),
    reason="processes are forked on Linux, beside no accelerator",
)


class Broken(Audit):
    """Ends its process, or raises, over the cells behind ``frozen-embeddings``."""

    refused = False

    def records(self, cells: Sequence[Cell], progress: Any = None) -> Iterator[Record]:
        if cells[0].defense == "frozen-embeddings":
            if self.refused:
                raise InputError("refused here")
            os._exit(1)
        return super().records(cells, progress)


def test_the_records_are_those_of_one_process(tmp_path: Path, model_folder: Path) -> None:
    plan = plan_for(model_folder, limit=2)
    alone = list(audit(plan, out=tmp_path / "alone"))
    prepared = Audit(plan)
    store = RunStore(tmp_path / "two", prepared.plan.canonical())
    prepared.describe(store)
    store.add(alone[0])  # what is stored already is not done again
    begun: list[Cell] = []
    with closing(Workers(prepared, 2, 1)) as workers:
        assert len(list(prepared.run(store, begun.append, workers))) == len(prepared.cells) - 1
        assert list(prepared.run(store, begun.append, workers)) == []
    store.close()
    assert len(begun) == len({c.of_step for c in prepared.cells})

    def by_key(folder: Path) -> list[dict[str, Any]]:
        return sorted(comparable(folder), key=lambda r: str(r["key"]))

    assert by_key(tmp_path / "two") == by_key(tmp_path / "alone")


@pytest.mark.parametrize(
    ("refused", "message"), [(False, "frozen-embeddings at batch size 1 was ended"), (True, "refused here")]
)
def test_a_process_that_ends_or_refuses_stops_the_run(
    tmp_path: Path, model_folder: Path, refused: bool, message: str
) -> None:
    prepared = Broken(plan_for(model_folder, limit=1))
    prepared.refused = refused
    store = RunStore(tmp_path, prepared.plan.canonical())
    done = []
    with closing(Workers(prepared, 1, 1)) as workers, pytest.raises(InputError, match=message):
        for record in prepared.run(store, workers=workers):
            done.append(record)
    assert {str(r["key"]) for r in store} == {r.key for r in done} and 0 < len(done) < len(prepared.cells)
    store.close()


def test_what_a_step_had_finished_is_kept_when_its_process_ends(tmp_path: Path, model_folder: Path) -> None:
    class Ends(Audit):
        """Ends its process at the second attack on the first step."""

        def records(self, cells: Sequence[Cell], progress: Any = None) -> Iterator[Record]:
            yield next(super().records(cells, progress))
            os._exit(1)

    prepared = Ends(plan_for(model_folder, limit=1))
    with closing(RunStore(tmp_path, prepared.plan.canonical())) as store:
        with closing(Workers(prepared, 1, 1)) as workers, pytest.raises(InputError, match="what is finished is kept"):
            list(prepared.run(store, workers=workers))
        (kept,) = store
        left = {cell.key for cells in prepared.left(store) for cell in cells}
    assert left == {cell.key for cell in prepared.cells} - {kept["key"]}


def test_processes_end_with_the_one_that_made_them(model_folder: Path) -> None:
    prepared = Audit(plan_for(model_folder, limit=1))
    here, there = os.pipe()
    first = os.fork()
    if not first:
        try:
            Workers(prepared, 2, 1)
        finally:
            os._exit(0)  # as if killed: nothing is closed
    os.close(there)  # the processes keep their copies as long as they run
    os.waitpid(first, 0)
    assert select.select([here], [], [], 30)[0] and os.read(here, 1) == b""
    os.close(here)


def test_how_many_processes() -> None:
    assert fitting(steps=9, max_memory=1, asked=None, threads=4) == 4
    assert fitting(steps=3, max_memory=1, asked=None, threads=4) == 3
    assert fitting(steps=9, max_memory=1, asked=6, threads=4) == 6
    assert fitting(steps=9, max_memory=1 << 40, asked=None, threads=4) == 1
    assert fitting(steps=0, max_memory=1, asked=2, threads=4) == 1
    assert fitting(steps=9, max_memory=1, asked=2, threads=4, device="cuda") == 1
