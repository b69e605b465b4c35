"""Continuous batching: requests join and leave a running batch between its rounds.

There is no thread of its own. Whoever waits for an answer runs rounds for all requests while nobody else does, so that a
batcher works from one thread and from many; a server may keep one thread in `run`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil
import torch

from .checks import check_count
from .decoding import Batch
from .errors import ConfigurationError, Overloaded, row_of
from .handle import Handle
from .kv_cache import numbers_per_token
from .prompts import Prompt, prompt_ids
from .rows import Job, Row
from .runner import PREFILL_CHUNK, Runner
from .sampling import Processor
from .settings import make_settings

if TYPE_CHECKING:
    from .decoder import Decoder

logger = logging.getLogger("lossytune")


class Batcher:
    """Made by `Decoder.batcher()`. Requests are admitted in the order they came, as soon as a row is free.

    Its caches are its own, so that other calls of the decoder may come between its rounds (not during one: the models are
    not to be run from two threads at once). All methods may be called from any thread.
    """

    def __init__(self, decoder: Decoder, max_batch: int = 8, max_length: int = 4096, max_waiting: int = 256) -> None:
        for name, value in (("max_batch", max_batch), ("max_length", max_length), ("max_waiting", max_waiting)):
            check_count(name, value)
        self.decoder = decoder
        self._settings = decoder.settings  # all rows of a batch have the same, but for alpha
        self.max_batch, self.max_waiting = max_batch, max_waiting
        limit = decoder.target.position_limit
        #: most tokens of prompt and answer together
        self.max_length = max_length if limit is None else min(max_length, limit)
        needed, free = max_batch * self.max_length * _token_bytes(decoder), _free_bytes(decoder.target.device)
        if needed > free:
            raise ConfigurationError(
                f"{max_batch} rows of {self.max_length} tokens need {needed / 1e9:.1f} GB of cache, and {free / 1e9:.1f} GB "
                f"are free: lower max_batch or max_length"
            )
        self._news = threading.Condition()
        self._waiting: deque[Handle] = deque()
        self._running: dict[int, Handle] = {}
        self._in_step, self._closed, self._count = False, False, 0
        self._batch = self._fresh()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def submit(self, prompt: Prompt, max_new_tokens: int = 256, **options: Any) -> Handle:
        """Puts a request into the queue. prompt: a string or messages. options: see `submit_ids`."""
        return self.submit_ids(prompt_ids(self.decoder.tokenizer, prompt), max_new_tokens, **options)

    def submit_ids(
        self,
        prompt: list[int],
        max_new_tokens: int = 256,
        *,
        seed: int | None = None,
        stop: Sequence[str] = (),
        processors: Sequence[Processor] = (),
        alpha: float | None = None,
        **sampling: Any,
    ) -> Handle:
        """Puts a request of token ids into the queue; returns at once.

        seed: the same seed gives the same answer, whoever shares the batch (up to ties in floating point). alpha: relaxation
        of this request, 0 for lossless; None: the decoder's. sampling: temperature, top_k, top_p, repetition_penalty.
        Raises ConfigurationError for what cannot be answered, and Overloaded when `max_waiting` requests wait.
        """
        job = self._job(max_new_tokens, seed, stop, processors, alpha, sampling)
        self.decoder.check_prompts([prompt])
        with self._news:
            if self._closed:
                raise ConfigurationError("the batcher is closed; make another with Decoder.batcher()")
            if len(self._waiting) >= self.max_waiting:
                raise Overloaded(f"{len(self._waiting)} requests wait; max_waiting is {self.max_waiting}: try again later")
            row = Row(self._count, list(prompt), job)
            if row.longest > self.max_length:
                raise ConfigurationError(
                    f"prompt and new tokens need {row.longest} positions; this batcher has {self.max_length} for a request: "
                    f"shorten the prompt, lower max_new_tokens, or raise max_length"
                )
            self._count += 1
            handle = Handle(self, row, seed is not None)
            self._waiting.append(handle)
            self._gauge()
            self._news.notify_all()
        return handle

    def step(self) -> bool:
        """Admits requests, and runs one round of all; returns whether there is more to do. A step that another thread is in
        is waited for."""
        with self._news:
            self._news.wait_for(lambda: not self._in_step)
            self._in_step = True
        try:
            self._step()
        except BaseException as error:  # about no request in particular: the caches cannot be trusted
            logger.exception("a round failed; the %d running requests end with its error", len(self._running))
            self._fail(list(self._running.values()), error)
            self._batch = self._fresh()
            if not isinstance(error, Exception):
                raise
        finally:
            with self._news:
                self._in_step = False
                self._gauge()
                self._news.notify_all()
        return self._work()

    def run(self) -> None:
        """Runs rounds until the batcher is closed, and waits where there is nothing to do: what a server's thread does."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._work())
                if self._closed:
                    return
            self.step()

    def close(self) -> None:
        """Cancels what has not ended, and frees the caches."""
        with self._news:
            self._closed = True
            for handle in (*self._waiting, *self._running.values()):
                handle._cancelled = True
        self.step()
        self._batch = self._fresh()

    def wake(self) -> None:
        """Lets those who wait look again."""
        with self._news:
            self._news.notify_all()

    def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Until `ready()`, running rounds while nobody else does. Raises TimeoutError after `timeout_s` seconds."""
        ends = None if timeout_s is None else monotonic() + timeout_s
        while not ready():
            left = None if ends is None else ends - monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"the request has not ended after {timeout_s} s")
            with self._news:
                if self._in_step and not ready():
                    self._news.wait(left)
                    continue
            if not ready():
                self.step()

    # one step

    def _work(self) -> bool:
        return bool(self._waiting or self._running)

    def _fresh(self) -> Batch:
        return Batch(self.decoder.target.fork(), self.decoder.draft.fork(), self.decoder.watch)

    def _job(
        self,
        max_new_tokens: int,
        seed: int | None,
        stop: Sequence[str],
        processors: Sequence[Processor],
        alpha: float | None,
        sampling: dict[str, Any],
    ) -> Job:
        settings = self._settings
        if alpha is not None:
            settings = make_settings(**{**settings.model_dump(), "alpha": alpha})
            if alpha and not settings.relaxed:
                raise ConfigurationError(
                    f"alpha is {alpha}; the decoder's settings are lossless whatever alpha is "
                    f"(rule {settings.rule}, draft_length {settings.draft_length})"
                )
        job = self.decoder.make_job(
            max_new_tokens, seed=seed, stop=stop, processors=processors, settings=settings, **sampling
        )
        # where a round ends decides what a row's numbers are for: a seed needs lengths that no other row changes
        return job if seed is None else replace(job, draft_length=settings.draft_length_for(self.max_batch))

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        rows = self._batch.rows
        if not rows:
            return
        states = [row.job.generator.get_state() if self._running[row.index]._seeded else None for row in rows]
        try:
            done = self._batch.round()
        except Exception as error:
            place = row_of(error)
            if place is None:
                raise
            for row, state in zip(rows, states, strict=True):
                if state is not None:  # the others draw again as if the failed request had never been there
                    row.job.generator.set_state(state)
            self._fail([self._running[rows[place].index]], error)
        else:
            for place, row in enumerate(rows):
                handle = self._running[row.index]
                handle.stats.add(done, [place])
                self._publish(handle, row.finish_reason)
        self._keep_running()

    def _keep_running(self) -> None:
        self._batch.keep([place for place, row in enumerate(self._batch.rows) if row.index in self._running])

    def _drop_cancelled(self) -> None:
        with self._news:
            gone = [handle for handle in self._waiting if handle._cancelled]
            self._waiting = deque(handle for handle in self._waiting if not handle._cancelled)
        for handle in gone:
            self._publish(handle, "cancelled")
        if running := [handle for handle in self._running.values() if handle._cancelled]:
            self.decoder.watch.ended([handle._row for handle in running], None)
            for handle in running:
                self._publish(handle, "cancelled")
            self._keep_running()

    def _admit(self) -> None:
        """Reads the prompts of waiting requests while there are rows for them, and about a chunk of tokens at most, so that
        those that run do not wait for long."""
        read = 0
        while self._waiting and len(self._batch.rows) < self.max_batch and read < PREFILL_CHUNK:
            with self._news:
                handle = self._waiting.popleft()
            row, alone = handle._row, self._fresh()
            read += len(row.prompt)
            self._running[row.index] = handle
            try:
                handle.stats.prefill_s = alone.start([row])
            except Exception as error:
                self.decoder.watch.began([row], 0.0)
                self._fail([handle], error)
            else:
                self._batch.join(alone, self.max_batch)

    def _fail(self, handles: Sequence[Handle], error: BaseException) -> None:
        self.decoder.watch.ended([handle._row for handle in handles], error)
        for handle in handles:
            handle._error = error
            self._publish(handle, "error")

    def _publish(self, handle: Handle, reason: str | None) -> None:
        """Lets others see how far a request is; tokens before the reason, since they look without a lock."""
        handle._tokens = len(handle._row.output)
        handle._reason = reason
        if reason is not None:
            self._running.pop(handle._row.index, None)

    def _gauge(self) -> None:
        self.decoder.counters.set(running=len(self._running), waiting=len(self._waiting))


def _token_bytes(decoder: Decoder) -> int:
    """Bytes that one token takes in the caches of the target and of a draft model."""
    draft = getattr(decoder.draft, "runner", None)
    return sum(
        numbers_per_token(runner.model.config) * runner.cache_dtype.itemsize
        for runner in (decoder.target, draft)
        if isinstance(runner, Runner)
    )


def _free_bytes(device: torch.device) -> int:
    """Bytes of the device's memory that are free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)
