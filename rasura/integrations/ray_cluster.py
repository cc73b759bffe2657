"""An audit distributed over a Ray cluster: every worker holds the prepared audit, and only the driver writes the store.

The unit of work is one training step with all attacks on its message, so that a protection is computed once.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rasura.core.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from rasura.core.records import Record
    from rasura.core.run_store import RunStore
    from rasura.runs.audit import Audit
    from rasura.runs.cells import Cell

LOSSES = 3
"""How many workers may be lost on the same cells before the run stops: the cells then kill their workers, most likely by
memory."""

_UPGRADE = "pip install -U 'rasura[ray]', or leave out --engine ray"

_STRANGER = """
import sys, ray
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None)
except ray.exceptions.AuthenticationError:
    print("refused")
"""


class Worker:
    """One process of the cluster; ``threads``: of torch, as many as the driver's, so that figures are the same."""

    def __init__(self, prepared: Audit, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.prepared = prepared

    def records(self, cells: Sequence[Cell]) -> tuple[list[Record], dict[str, str]]:
        """The Records of ``cells``, which share a step; and the metrics that this machine lacks, with the reason."""
        return list(self.prepared.records(cells)), self.prepared.unavailable


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise MissingExtra("the engine ray needs Ray: pip install 'rasura[ray]'") from None
    return ray


def _answers(address: str | None) -> None:
    """Raises ``InputError`` where nothing listens at ``host:port``: Ray itself takes a minute to give up."""
    host, _, port = (address or "").rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"no Ray cluster at {address} ({why}); start one with ray start --head") from None


@contextmanager
def _secret(ray: Any) -> Iterator[None]:
    """Ray's environment with a fresh secret: a cluster started in it answers only processes that inherit the secret.

    Raises ``InputError`` if this version of Ray knows no secrets.
    """
    try:
        loader, config = ray._raylet.AuthenticationTokenLoader, ray._raylet.Config
    except AttributeError:
        raise InputError(f"Ray {ray.__version__} cannot keep strangers out of a cluster; {_UPGRADE}") from None

    def read() -> None:  # Ray reads its environment when it is imported
        config.initialize("")
        loader.instance().reset_cache()

    before = {name: os.environ.pop(name, None) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    read()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        read()


def keeps_out(address: str) -> bool:
    """Whether the cluster at ``address`` turns a process with another secret away: tried, not believed."""
    stranger = [sys.executable, "-c", _STRANGER, address]
    other = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        told = subprocess.run(stranger, env=other, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return told.stdout.split() == ["refused"]


@contextmanager
def _joined(ray: Any, address: str | None) -> Iterator[None]:
    """In the cluster at ``address``, or in one that this process starts and ends, and that others cannot join.

    Raises ``InputError`` if no cluster answers, and if others could join the cluster of this process.
    """
    _answers(address)
    # "local": with no address at all, Ray joins a cluster that it finds in RAY_ADDRESS or on this machine.
    own = {} if address else {"include_dashboard": False}
    with nullcontext() if address else _secret(ray):
        try:
            ray.init(address=address or "local", log_to_driver=False, logging_level="error", **own)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise InputError(f"no Ray cluster at {address or 'this machine'} ({str(error).splitlines()[0]})") from None
        try:
            if not address and not keeps_out(ray.get_runtime_context().gcs_address):
                raise InputError(f"others could join the cluster of Ray {ray.__version__} and read the texts; {_UPGRADE}")
            yield
        finally:
            ray.shutdown()


def spread(
    prepared: Audit,
    store: RunStore,
    *,
    address: str | None = None,
    workers: int | None = None,
    progress: Callable[[Cell], None] | None = None,
) -> Iterator[Record]:
    """As ``Audit.run``, on ``workers`` processes of the Ray cluster at ``address``.

    None starts one on this machine, whatever RAY_ADDRESS says; only processes that know its fresh secret can join it.

    Records are the same as with the local engine except for their costs, in the order in which they end. Cells whose worker
    is lost are repeated by another. Raises ``InputError`` if no cluster answers, if others could join the cluster started
    here, and if cells lose every worker.
    """
    import torch

    ray, threads = _ray(), torch.get_num_threads()
    if workers is not None and workers < 1:
        raise InputError(f"workers is {workers}; expected at least 1")
    prepared.describe(store)
    if not (left := prepared.left(store)):
        return
    with _joined(ray, address):
        count = min(len(left), workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads))
        held = ray.put(prepared)
        make = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(Worker)
        idle = [make.remote(held, threads) for _ in range(count)]
        running: dict[Any, tuple[Any, Sequence[Cell], int]] = {}
        waiting: list[tuple[Sequence[Cell], int]] = [(cells, 0) for cells in left]
        while waiting or running:
            while waiting and idle:
                worker, (cells, lost) = idle.pop(), waiting.pop(0)
                if progress is not None:
                    progress(cells[0])
                running[worker.records.remote(cells)] = worker, cells, lost
            (ready,), _ = ray.wait(list(running), num_returns=1)
            worker, cells, lost = running.pop(ready)
            try:
                found, unavailable = ray.get(ready)
            except ray.exceptions.RayActorError as error:
                if lost + 1 == LOSSES:
                    raise InputError(
                        f"{LOSSES} workers were lost on {cells[0].defense} at batch size {cells[0].batch_size} "
                        f"({str(error).splitlines()[0]}); if memory ran out, pass fewer --workers or a lower --max-memory"
                    ) from None
                waiting.append((cells, lost + 1))
                idle.append(make.remote(held, threads))
                continue
            idle.append(worker)
            prepared.unavailable.update(unavailable)
            for record in found:
                store.add(record)
                yield record
