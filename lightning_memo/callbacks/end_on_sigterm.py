"""Ends all processes of a run after the same batch when one of them receives SIGTERM.

A handler of signals must not communicate: it runs wherever the main thread happens to be, and not at all while this
thread waits in a collective. The system also writes the number of each signal to a pipe. A thread reads this pipe, and
tells the other processes through a connection of its own to the store of the process group, which it asks now and then
whether another process has told. Steps themselves need no communication.

Each process counts its steps. Once it knows of the signal, it tells its number of steps, and begins no further step
until rank 0 has the numbers of all. The last step is the one after the largest number: no process has ended it yet. A
process that cannot get there in time, because a step is long or another process is gone, is ended by its thread.
After the last step, saving a checkpoint may take long; only the loss of a process that this one started ends it then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import Store
from typing_extensions import override

SIGTERM_STATUS: Final = 128 + signal.SIGTERM
"""Exit status of a process that SIGTERM ended, as shells report it."""

_ENDED: Final = (None, 0, -signal.SIGTERM, SIGTERM_STATUS)  # of a process that runs, or has ended as it should
_GRACE_SECONDS: Final = 20.0  # torchrun, SLURM and Kubernetes kill after 30 by default
_CHILDREN_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.25
_AGREE_SECONDS: Final = 0.02


class EndTogether:
    """Watches for SIGTERM, in this process and in the others of the run, until it is closed.

    Args:
        children: Processes of the run that this one started. The list is emptied when they end together with this one:
            Lightning kills this process if it finds that a process in its list has failed.
    """

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        self._children, self._own_children = children, list(children)
        self._store: Store | None = None
        self._name, self._rank, self._size = "", 0, 1
        self._turn = threading.Condition()
        self._steps, self._asked = 0, False
        self._last: int | None = None
        self._reached, self._closed = threading.Event(), threading.Event()
        self._reads, self._writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._earlier: int | None = None
        if threading.current_thread() is threading.main_thread():  # signals go to this thread only
            self._earlier = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
            _watching.add(self)
        self._thread = threading.Thread(target=self._watch, name="SIGTERM", daemon=True)
        self._thread.start()

    def join(self, store: Store, rank: int, size: int) -> None:
        """Begin to listen to the other processes. Before that, SIGTERM ends this process at once.

        Args:
            store: Store of the process group.
            rank: Rank of this process.
            size: Number of processes.
        """
        own = store.clone()
        run = own.add(f"lightning_memo/sigterm/runs of {rank}", 1)  # a group may serve several runs
        self._name, self._rank, self._size = f"lightning_memo/sigterm/{run}", rank, size
        self._store = own

    def ends_here(self) -> bool:
        """Count a step, and return whether it was the last one. All processes call this at the same places."""
        with self._turn:
            self._steps += 1
            self._turn.wait_for(lambda: not self._asked or self._last is not None)
            ends = self._last is not None and self._steps >= self._last
        if ends:
            self._reached.set()
        return ends

    @property
    def asked(self) -> bool:
        """Whether SIGTERM arrived, in this process or in another one."""
        return self._asked or self._is_told()  # a lost process may have told since the thread has looked

    def end_now(self) -> None:
        """End this process, and those that it started, without waiting for the end of a step or of a collective."""
        deadline = time.monotonic() + _CHILDREN_SECONDS
        for child in self._own_children:
            try:
                child.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                child.kill()
        os._exit(SIGTERM_STATUS)

    def close(self) -> None:
        """Stop watching."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.write(self._writes, b"\0")
        self._thread.join()
        if self._earlier is not None:
            signal.set_wakeup_fd(self._earlier)
            _watching.discard(self)
        os.close(self._reads)
        os.close(self._writes)

    # ---- in the thread

    def _watch(self) -> None:
        while not self._closed.is_set():
            ready, _, _ = select.select([self._reads], [], [], _POLL_SECONDS)
            received = bool(ready) and signal.SIGTERM in os.read(self._reads, 4096)
            if received or self._a_child_received() or self._is_told():
                self._end()
                return

    def _is_told(self) -> bool:
        try:
            return self._store is not None and self._in_store("told")
        except RuntimeError:  # the process that has the store is gone, which collectives will say
            self._store = None
            return False

    def _end(self) -> None:
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in self._own_children:  # one that still starts listens to nothing else
            child.send_signal(signal.SIGTERM)
        self._children.clear()
        if self._store is None:
            self.end_now()

        def waits() -> bool:
            self._reached.wait(_AGREE_SECONDS)
            return time.monotonic() < deadline and not self._reached.is_set() and not self._closed.is_set()

        with contextlib.suppress(RuntimeError):  # the process that has the store is gone
            self._agree(waits)
        while waits():
            pass
        while self._reached.is_set() and not self._closed.wait(_POLL_SECONDS):
            if any(child.poll() not in _ENDED for child in self._own_children):
                self.end_now()
        if not self._closed.is_set():
            self.end_now()

    def _agree(self, waits: Callable[[], bool]) -> None:
        """Find the last step together with the other processes."""
        try:
            self._to_store("told", 1)  # before the main thread can end this process
        finally:
            with self._turn:
                self._asked, steps = True, self._steps
        self._to_store(f"steps of {self._rank}", steps)
        if self._rank == 0:
            names = [f"steps of {rank}" for rank in range(self._size)]
            while not self._in_store(*names):
                if not waits():
                    return
            self._to_store("last", 1 + max(map(self._from_store, names)))
        while not self._in_store("last"):
            if not waits():
                return
        last = self._from_store("last")
        with self._turn:
            self._last = last
            self._turn.notify_all()

    def _a_child_received(self) -> bool:
        return any(child.poll() in (-signal.SIGTERM, SIGTERM_STATUS) for child in self._own_children)

    def _in_store(self, *names: str) -> bool:
        """Whether the store has all of these values."""
        assert self._store is not None
        return bool(self._store.check([f"{self._name}/{name}" for name in names]))

    def _from_store(self, name: str) -> int:
        assert self._store is not None
        return int(self._store.get(f"{self._name}/{name}"))

    def _to_store(self, name: str, value: int) -> None:
        assert self._store is not None
        self._store.set(f"{self._name}/{name}", str(value))


_watching: set[EndTogether] = set()


def _forget_in_child() -> None:
    """A forked process has the pipe, too; its signals are none of the run's."""
    if _watching:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


log = logging.getLogger(__name__)


class EndOnSigterm(Callback):
    """Ends Lightning's loops after the same batch in all processes when one of them receives SIGTERM.

    It counts batches in the loops of a trainer, from its creation until it is closed. Lightning's own handler of the
    signal takes part in a collective, for which the other processes wait in another one.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        launcher = trainer.strategy.launcher
        self.together = EndTogether(getattr(launcher, "procs", []))
        trainer._signal_connector = _QuietSignals(trainer)
        trainer._signal_connector.register_signal_handlers()
        trainer.callbacks.insert(0, self)

    @override
    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
        return Callback, ()  # in a copy of the trainer, this callback has nothing to watch

    def close(self) -> None:
        """Stop watching."""
        self.together.close()
        self._trainer.callbacks[:] = [callback for callback in self._trainer.callbacks if callback is not self]

    def _on_batch_end(self) -> None:
        """Let Lightning end the loop as in one process.

        Raises:
            SIGTERMException: It would not, outside of training.
        """
        if self.together.ends_here():
            self._trainer._signal_connector.received_sigterm = True
            if self._trainer.state.fn != TrainerFn.FITTING:
                raise SIGTERMException(SIGTERM_STATUS)

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._on_batch_end()

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._on_batch_end()

    @override
    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._on_batch_end()

    @override
    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._on_batch_end()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # Another process is gone, or a worker of the data loader got the signal, too. Other callbacks would save a
        # checkpoint now, and wait for processes that are not there.
        if not isinstance(exception, SIGTERMException) and self.together.asked:
            log.error("SIGTERM ends this process before the end of the batch: %s", str(exception).partition("\n")[0])
            self.together.end_now()


class _QuietSignals(_SignalConnector):
    """Lightning's handlers without communication, from the start of a run: models can take minutes to build."""

    @override
    def register_signal_handlers(self) -> None:
        if not self._original_handlers:
            super().register_signal_handlers()

    @override
    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        log.info("received SIGTERM: all processes end after the same batch")
