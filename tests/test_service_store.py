"""The store of the model service and its jobs: what open jobs will take counts, and a job that has ended stores nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save
from service_setting import ALICE, container

from rasura.server.app import application
from rasura.server.container import CONTENT_TYPE
from rasura.server.jobs import STARTS, Supervisor
from rasura.server.limits import Limits, Refused, Tenants
from rasura.server.models import ROOM, checked
from rasura.server.store import Job, Model, Store
from rasura.testing.tiny import tiny

DATA = {
    "ids": torch.tensor([1, 5, 2, 1, 6, 2], dtype=torch.int32),
    "lengths": torch.tensor([3, 3], dtype=torch.int32),
    "labels": torch.tensor([0, 1], dtype=torch.int32),
}


def stored(store: Store, name: str, size: int = 10, about: dict[str, Any] | None = None, by: str | None = None) -> Model:
    with store.incoming() as place:
        (place / "model.safetensors").write_bytes(b"x" * size)
        return store.add_model("alice", name, about or {"trained": 40}, place, by=by)


def queued(store: Store, model: Model, output: str, room: int = 1 << 30) -> Job:
    with store.incoming() as place:
        (place / "data.safetensors").write_bytes(b"x")
        return store.add_job(model, output, {"epochs": 3}, place, 10, room)


def test_the_models_of_open_jobs_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = stored(store, "notes")
    jobs = [queued(store, model, f"out{k}", room=100) for k in range(2)]
    assert store.bytes_of("alice") == 90 and store.bytes_of("bob") == 0
    with pytest.raises(Refused, match="there is no room for the model that this job will make") as found:
        queued(store, model, "out2", room=129)
    assert found.value.status == 413 and len(store.jobs("alice")) == 2
    store.end_job(jobs[0].id, "cancelled")
    assert store.bytes_of("alice") == 50
    with pytest.raises(Refused, match="takes more bytes than its job was given"):
        stored(store, "out1", 41, by=jobs[1].id)
    assert store.job(jobs[1].id).state == "queued" and len(list((tmp_path / "models").iterdir())) == 1
    stored(store, "out1", 30, by=jobs[1].id)
    assert store.job(jobs[1].id).state == "done" and store.bytes_of("alice") == 40
    assert stored(store, "old", 30, {"kind": "causal"}).trained > 60  # of an older store
    store.close()


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "llama"])
def test_a_model_is_counted_as_large_as_training_makes_it(family: str, tmp_path: Path) -> None:
    half: Any = tiny(family, "classification").half()
    half.save_pretrained(tmp_path / "half")
    half.float().save_pretrained(tmp_path / "whole")
    size = sum(file.stat().st_size for file in (tmp_path / "whole").iterdir())
    for name in ("half", "whole"):
        assert size <= checked(tmp_path / name)["trained"] <= size + 2 * ROOM


def test_no_more_jobs_are_taken_than_there_is_room_for(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.incoming() as place:
        tiny("bert", "classification", blocks=1, hidden=16).save_pretrained(place)  # type: ignore[operator]
        model = store.add_model("alice", "notes", checked(place), place)
    limits = Limits(tenant_bytes=model.bytes + 2 * model.trained + 5)
    app = application(store, Tenants({"alice": ALICE}), limits)  # its jobs wait: it is not started

    async def statuses() -> list[int]:
        headers = {"Authorization": f"Bearer {ALICE}", "Content-Type": CONTENT_TYPE}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            bodies = [container({"output": f"out{k}"}, {"data.safetensors": save(DATA)}) for k in range(3)]
            return [(await client.post("/v1/models/notes/jobs", content=body)).status_code for body in bodies]

    assert asyncio.run(statuses()) == [202, 202, 413]
    assert store.bytes_of("alice") <= limits.tenant_bytes
    store.close()


@pytest.mark.parametrize("state", ["cancelled", "failed", "done"])
def test_a_job_that_has_ended_stores_no_model(state: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    job = queued(store, stored(store, "notes"), "out")
    assert store.next_job() is not None and store.move_job(job.id, state)
    with pytest.raises(Refused, match="the job has ended"):
        stored(store, "out", by=job.id)
    assert store.job(job.id).state == state and [m.name for m in store.models("alice")] == ["notes"]
    assert len(list((tmp_path / "models").iterdir())) == 1
    store.close()


def test_a_cancelled_job_keeps_its_data_until_its_process_is_gone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    job = queued(store, stored(store, "notes"), "out")
    assert store.next_job() is not None
    supervisor = Supervisor(store, "cpu")
    # It writes into the job's folder for as long as it lives.
    code = "import pathlib, sys\nprint(flush=True)\nwhile True: pathlib.Path(sys.argv[1], 'part').write_text('x')"
    command = [sys.executable, "-c", code, str(store.job_path(job.id))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None and child.stdout.read(1) == b"\n"
        supervisor._running = (job.id, child)
        assert supervisor.cancel(job) and child.returncode is not None
    assert store.job(job.id).state == "cancelled" and not store.job_path(job.id).exists()
    assert not supervisor.cancel(job)
    store.close()


def test_a_start_removes_nothing_that_the_store_did_not_make(tmp_path: Path) -> None:
    """A folder of somebody's own models is an easy slip for --store."""
    own = [tmp_path / kind / name / "file" for kind, name in (("models", "bert"), ("jobs", "monday"), ("incoming", "mail"))]
    for file in own:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    store = Store(tmp_path)
    kept = stored(store, "notes")
    with store.incoming() as place:  # as a killed server leaves them
        for part in (place, tmp_path / "models" / "0123456789abcdef"):
            part.mkdir(exist_ok=True)
        store.sweep()
        assert not place.exists()
    assert all(file.read_text() == "mine" for file in own)
    assert {p.name for p in (tmp_path / "models").iterdir()} == {"bert", kept.id}
    store.close()


def test_orderly_stops_of_the_server_do_not_use_up_the_starts_of_a_job(tmp_path: Path) -> None:
    store = Store(tmp_path)
    job = queued(store, stored(store, "notes"), "tuned")
    for _ in range(STARTS):
        supervisor = Supervisor(store, "cpu")
        supervisor.start()
        while store.job(job.id).state != "running":
            time.sleep(0.01)
        supervisor.stop()
        store.close()
        store = Store(tmp_path)
        store.sweep()
    left = store.job(job.id)
    assert (left.state, left.starts) == ("queued", 0) and store.job_path(job.id).is_dir()
    for _ in range(STARTS):  # a server that is killed with its job leaves it running, and that counts
        assert store.next_job() is not None
        store.sweep()
    assert store.job(job.id).starts == STARTS
    store.close()
