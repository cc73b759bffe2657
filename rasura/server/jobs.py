"""Runs the queued jobs one by one, each in a child process, so that a crash of one does not affect the server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

from rasura.server.store import Job, Store

log = logging.getLogger("rasura.server")

STARTS = 3
"""Times a job is started that ends without a word (killed for memory, for instance), before it has failed. Starts that an
orderly stop of the server ended do not count."""


class Supervisor:
    """A thread that starts jobs. ``device``: where they train."""

    def __init__(self, store: Store, device: str) -> None:
        self.store, self.device = store, device
        self._wake = threading.Event()
        self._stopping = False
        self._lock = threading.Lock()
        self._running: tuple[str, subprocess.Popen[bytes]] | None = None
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is a new job."""
        self._wake.set()

    def cancel(self, job: Job) -> bool:
        """End an open job, and remove its data when its process is gone; False where it was at its end."""
        if not self.store.move_job(job.id, "cancelled"):
            return False
        with self._lock:
            child = self._running[1] if self._running is not None and self._running[0] == job.id else None
            if child is not None:
                child.kill()
        if child is not None:
            child.wait()
        self.store.end_job(job.id, "cancelled")
        return True

    def stop(self) -> None:
        """End the running job's process; it goes on at the next start."""
        with self._lock:
            self._stopping = True
            if self._running is not None:
                self._running[1].kill()
        self._wake.set()
        self._thread.join(10)

    def _loop(self) -> None:
        while not self._stopping:
            try:
                job = self.store.next_job()
                if job is not None:
                    self._run(job)
                    continue
            except Exception as error:  # a full disk, for instance: jobs wait, the thread lives
                log.error("jobs cannot be run: %s", type(error).__name__)
            self._wake.wait(1.0)
            self._wake.clear()

    def _run(self, job: Job) -> None:
        command = [sys.executable, "-m", "rasura.server.worker", str(self.store.folder), job.id, self.device]
        with self._lock:
            if self._stopping:
                self.store.move_job(job.id, "queued", uncounted=True)
                return
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
            )
            self._running = (job.id, child)
        child.wait()
        if child.stdin is not None:
            child.stdin.close()
        with self._lock:
            self._running = None
        if self._stopping:
            self.store.move_job(job.id, "queued", uncounted=True)
            return
        now = self.store.job(job.id)
        if now.state == "running":
            if now.starts >= STARTS:
                self.store.end_job(job.id, "failed", "its process was killed too often, perhaps for lack of memory")
            else:
                self.store.move_job(job.id, "queued")
        elif now.state == "cancelled":
            # The process may have written after the cancellation removed the folder.
            self.store.end_job(job.id, "cancelled")
