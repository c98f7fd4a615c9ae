"""Blocks on threads: a pool shared by all kernels of the process, one BLAS thread for each worker while it runs."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController


def cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Shared:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pool: ThreadPoolExecutor | None = None
        self.blas: ThreadpoolController | None = None
        self.users = 0
        self.restore: Callable[[], None] = lambda: None

    def executor(self) -> ThreadPoolExecutor:
        with self.lock:
            if self.pool is None:
                self.pool = ThreadPoolExecutor(max(1, cpus() - 1), "tile")
            return self.pool

    @contextmanager
    def one_blas_thread(self) -> Iterator[None]:
        """BLAS has one number of threads for the whole process: the first call in sets it to 1, the last one out restores it."""
        with self.lock:
            self.users += 1
            if self.users == 1:
                if self.blas is None:
                    self.blas = ThreadpoolController().select(user_api="blas")
                self.restore = self.blas.limit(limits=1).restore_original_limits
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if self.users == 0:
                    self.restore()


_shared = _Shared()


def _forked() -> None:
    global _shared
    _shared = _Shared()  # threads do not survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def run_blocks(blocks: int, worker: Callable[[Iterator[int]], None], threads: int) -> None:
    """Call worker(numbers of blocks) in up to `threads` threads, of which the caller's is one: they share the numbers
    0 … blocks-1.  An exception in one of them stops all and is raised here."""
    if threads == 1 or blocks <= 1:
        worker(iter(range(blocks)))
        return
    counter, stop = itertools.count(), threading.Event()

    def numbers() -> Iterator[int]:
        while not stop.is_set() and (n := next(counter)) < blocks:
            yield n

    def work() -> None:
        try:
            worker(numbers())
        except BaseException:
            stop.set()
            raise

    shared = _shared
    pool = shared.executor()
    with shared.one_blas_thread():
        others = [pool.submit(work) for _ in range(min(threads, blocks) - 1)]
        try:
            work()
        finally:
            stop.set()
            error = None
            for f in others:
                if not f.cancel():
                    error = f.exception() or error
        if error is not None:
            raise error
