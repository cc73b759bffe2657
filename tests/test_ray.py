"""The engine ray: the same Records as the local one, also where a worker dies, and clear refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from audit_setting import comparable, model_folder, plan_for

from rasura.cli.audit import run_audit
from rasura.cli.outcome import Ending
from rasura.core.interfaces import InputError
from rasura.core.records import Record
from rasura.core.run_store import RunStore
from rasura.integrations.ray_cluster import LOSSES, keeps_out, spread
from rasura.runs.audit import Audit, audit
from rasura.runs.cells import Cell

__all__ = ["model_folder"]


class Mortal(Audit):
    """Its process dies over the cells behind ``defense``, as often as ``times``."""

    def __init__(self, plan: Any, marks: Path, defense: str, times: int) -> None:
        super().__init__(plan)
        self.marks, self.defense, self.times = marks, defense, times

    def records(self, cells: Sequence[Cell], progress: Any = None) -> Iterator[Record]:
        deaths = len(list(self.marks.iterdir()))
        if cells[0].defense == self.defense and deaths < self.times:
            (self.marks / str(deaths)).touch()
            os._exit(1)
        return super().records(cells, progress)


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Mortal]]:
    import ray.cloudpickle as pickle

    # Workers do not know this folder of tests.
    module = sys.modules[__name__]
    pickle.register_pickle_by_value(module)
    yield Mortal
    pickle.unregister_pickle_by_value(module)


@pytest.mark.slow
def test_a_lost_worker_is_replaced_and_the_records_are_those_of_the_local_engine(
    tmp_path: Path, model_folder: Path, mortal: type[Mortal]
) -> None:
    plan = plan_for(model_folder, limit=2)
    list(audit(plan, out=tmp_path / "local"))
    (tmp_path / "marks").mkdir()
    prepared = mortal(plan, tmp_path / "marks", "frozen-embeddings", 1)
    store = RunStore(tmp_path / "ray", prepared.plan.canonical())
    prepared.describe(store)
    store.add(next(audit(plan, out=tmp_path / "begun")))  # what is stored already is not done again
    assert len(list(spread(prepared, store, workers=2))) == len(prepared.cells) - 1
    assert list(spread(prepared, store)) == []
    store.close()
    assert len(list((tmp_path / "marks").iterdir())) == 1

    def by_key(folder: Path) -> list[dict[str, Any]]:
        return sorted(comparable(folder), key=lambda r: str(r["key"]))

    assert by_key(tmp_path / "ray") == by_key(tmp_path / "local")


@pytest.mark.slow
def test_cells_that_lose_every_worker_are_named(tmp_path: Path, model_folder: Path, mortal: type[Mortal]) -> None:
    plan = plan_for(model_folder, limit=1, defenses=("none",))
    (tmp_path / "marks").mkdir()
    prepared = mortal(plan, tmp_path / "marks", "none", LOSSES + 1)
    store = RunStore(tmp_path / "ray", prepared.plan.canonical())
    with pytest.raises(InputError, match=f"{LOSSES} workers were lost on none at batch size 1"):
        list(spread(prepared, store, workers=1))
    store.close()


STRANGER = "import sys, ray; ray.init(sys.argv[1], logging_level='error'); print(ray.cluster_resources()['CPU'])"


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [None, "127.0.0.1:1"])
def test_a_cluster_of_its_own_is_closed_to_a_process_without_its_secret(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: str | None
) -> None:
    import ray

    if elsewhere:
        monkeypatch.setenv("RAY_ADDRESS", elsewhere)  # the group's cluster: not joined
    before = dict(os.environ)
    prepared = Audit(plan_for(model_folder, limit=1))
    store = RunStore(tmp_path / "run", prepared.plan.canonical())
    running: Any = spread(prepared, store, workers=1)
    assert next(running).status == "ok"
    address = ray.get_runtime_context().gcs_address
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER, address],
        env={**before, "RAY_NUM_REDIS_GET_RETRIES": "1"},
        capture_output=True,
        text=True,
    )
    assert stranger.returncode and not stranger.stdout and "InvalidAuthToken" in stranger.stderr
    assert keeps_out(address)
    running.close()
    store.close()
    assert not ray.is_initialized() and os.environ.get("RAY_AUTH_TOKEN") == before.get("RAY_AUTH_TOKEN")


@pytest.mark.slow
def test_a_cluster_that_others_can_join_is_noticed() -> None:
    import ray

    ray.init("local", include_dashboard=False, logging_level="error")
    try:
        assert not keeps_out(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


def test_a_ray_without_secrets_is_refused(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ray._raylet.AuthenticationTokenLoader")
    prepared = Audit(plan_for(model_folder, limit=1))
    store = RunStore(tmp_path, prepared.plan.canonical())
    with pytest.raises(InputError, match="cannot keep strangers out of a cluster"):
        next(spread(prepared, store))
    store.close()


@pytest.mark.parametrize(
    ("more", "message"), [({"workers": 0}, "workers is 0"), ({"address": "127.0.0.1:1"}, "no Ray cluster")]
)
def test_bad_input_is_refused(tmp_path: Path, model_folder: Path, more: dict[str, Any], message: str) -> None:
    prepared = Audit(plan_for(model_folder, limit=1))
    store = RunStore(tmp_path, prepared.plan.canonical())
    with pytest.raises(InputError, match=message):
        list(spread(prepared, store, **more))
    store.close()


def test_a_model_on_a_gpu_is_refused(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(InputError, match="--engine ray computes on CPUs, and --device is cuda; pass --device cpu"):
        run_audit(plan_for(model_folder, limit=1), tmp_path, "cuda", Ending(), "ray")
