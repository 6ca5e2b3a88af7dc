"""The one thread that touches torch, shared by training and sampling.

A small model is faster on one torch thread than on two, and one thread makes gradients
independent of what else is going on. Training work is a generator that yields every few tens of
milliseconds; between its slices sampling gets as much time as the slice took, so neither starves
the other. Without training, sampling runs freely, and the other way round.

Owns scheduling and nothing of what is scheduled. The public methods may be called from any thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from everburn.emulator.sampling.sampler import Batch, Sampler, Ticket

T = TypeVar("T")
Work = Generator[None, None, T]
"""A computation in slices; its return value is its result."""

STOP_SECONDS = 5.0
"""How long `stop` waits for a slice to end. Only making a base model takes longer, and that need
not be waited for: the thread is a daemon.
"""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    work: Work[Any]
    done: Callable[[Any, Exception | None], None]


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
        """Stop after the current slice, abandoning what is queued."""
        self._stopping = True
        self._wake.set()
        self._thread.join(STOP_SECONDS)

    def submit(self, work: Work[T], done: Callable[[T | None, Exception | None], None]) -> None:
        """Run `work` to its end; `done(result, error)` is called on the compute thread.

        Works take turns slice by slice: two that must not interleave must not be queued together.
        """
        self._post(lambda: self._jobs.append(_Job(work, done)))

    def sample(self, key: Hashable, open_batch: Callable[[], Batch], ticket: Ticket) -> None:
        """Queue a sampling request for the weights that `key` names (see `Sampler.add`)."""

        def add() -> None:
            try:
                self._sampler.add(key, open_batch, ticket)
            except Exception as error:
                _fail(ticket, error)

        self._post(add)

    def forget(self, key: Hashable, error: Exception) -> None:
        """Drop the weights that `key` names; requests that use them fail with `error`."""

        def drop() -> None:
            for ticket in self._sampler.forget(key):
                _fail(ticket, error)

        self._post(drop)

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.set()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while not self._stopping:
            self._wake.clear()
            self._open_inbox()
            if self._jobs:
                began = time.perf_counter()
                self._train_slice()
                self._sample(until=time.perf_counter() + (time.perf_counter() - began))
            elif self._sampler.busy:
                self._sampler_step()
            elif not self._inbox:
                self._wake.wait()

    def _open_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _train_slice(self) -> None:
        job = self._jobs.popleft()
        try:
            next(job.work)
        except StopIteration as stop:
            job.done(stop.value, None)
        except Exception as error:
            job.done(None, error)
        else:
            self._jobs.append(job)

    def _sample(self, until: float) -> None:
        while self._sampler.busy and time.perf_counter() < until:
            self._sampler_step()
            self._open_inbox()

    def _sampler_step(self) -> None:
        for key, error in self._sampler.step():
            log.error("a sampling batch failed", exc_info=error)
            for ticket in self._sampler.forget(key):
                _fail(ticket, error)


def _fail(ticket: Ticket, error: Exception) -> None:
    ticket.error = error
    ticket.done(ticket)
