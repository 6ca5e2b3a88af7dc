"""The one thread that runs torch, shared by training and sampling.

A small model is faster on one torch thread than on two, and one thread makes gradients independent
of load. Training work yields every few tens of milliseconds; sampling then gets as much time as the
slice took, so neither starves the other.

Owns scheduling only. The public methods may be called from any thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from everburn.emulator.sampling.sampler import Batch, Sampler, Ticket, uncancellable_future

T = TypeVar("T")
Work = Generator[None, None, T]
"""A computation in slices."""

STOP_SECONDS = 5.0
"""How long `stop` waits for the current slice. Only making a base model takes longer; it dies with
the process, since the thread is a daemon.
"""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    work: Work[Any]
    result: Future[Any]


class ComputeThread:
    def __init__(self) -> None:
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._jobs: deque[_Job] = deque()
        self._sampler = Sampler()
        self._thread = threading.Thread(target=self._run, name="everburn-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current slice. Queued work is abandoned."""
        self._stopping = True
        self._wake.set()
        self._thread.join(STOP_SECONDS)

    def submit(self, work: Work[T]) -> Future[T]:
        """Run `work`. Works interleave slice by slice: submit only works that may."""
        result: Future[T] = uncancellable_future()
        self._post(lambda: self._jobs.append(_Job(work, result)))
        return result

    def sample(self, key: Hashable, open_batch: Callable[[], Batch], ticket: Ticket) -> None:
        """See `Sampler.add`."""

        def add() -> None:
            try:
                self._sampler.add(key, open_batch, ticket)
            except Exception as error:
                ticket.completion.set_exception(error)

        self._post(add)

    def forget(self, key: Hashable, error: Exception) -> None:
        """Drop the weights that `key` names. Their requests fail with `error`."""

        def drop() -> None:
            for ticket in self._sampler.forget(key):
                ticket.completion.set_exception(error)

        self._post(drop)

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.set()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while not self._stopping:
            self._wake.clear()
            self._drain_inbox()
            if self._jobs:
                began = time.perf_counter()
                self._train_slice()
                ended = time.perf_counter()
                self._sample(until=ended + (ended - began))
            elif self._sampler.busy:
                self._sampler_step()
            elif not self._inbox:
                self._wake.wait()

    def _drain_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _train_slice(self) -> None:
        job = self._jobs.popleft()
        try:
            next(job.work)
        except StopIteration as stop:
            job.result.set_result(stop.value)
        except Exception as error:
            job.result.set_exception(error)
        else:
            self._jobs.append(job)

    def _sample(self, until: float) -> None:
        while self._sampler.busy and time.perf_counter() < until:
            self._sampler_step()
            self._drain_inbox()

    def _sampler_step(self) -> None:
        for key, error in self._sampler.step():
            log.error("a sampling batch failed", exc_info=error)
            for ticket in self._sampler.forget(key):
                ticket.completion.set_exception(error)
