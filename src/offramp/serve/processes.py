"""Several processes that serve behind one address: workers, and the parent that starts them and looks after them.

All workers accept from one listening socket, which the parent made and keeps: what waits there outlives any of them.
Each writes its counts into its row of a memory they share, so any of them can tell everybody's. The parent passes
signals on, says when a worker dies, and starts another in its place, which goes on with its counts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from fastapi import FastAPI

from offramp.common.console import console, log_to_console, say
from offramp.common.extras import MissingExtra, explained
from offramp.common.images import quiet_pillow
from offramp.common.registry import load_plugin, loaded
from offramp.serve.metrics import SLOTS, Row, Rows, forget_moment
from offramp.serve.server import DRAIN_S, Server, address_of, listen, server_config, signals_stay_here

LOOK_S = 0.1  # between two looks at the workers
STEADY_S = 60.0  # a worker that lived so long was well
LONGEST_WAIT_S = 30.0  # before the next of those that do not live long is started
END_S = 2 * DRAIN_S + 15.0  # for workers that were told to stop
WORK = "from offramp.serve.processes import work; work()"
ROW_BYTES = 8 * SLOTS


@dataclass(frozen=True)
class Job:
    """What every worker serves: the application that `factory`, as module:function, makes of `words` and its rows."""

    factory: str
    words: dict[str, Any]
    plugins: list[str] = field(default_factory=lambda: list(loaded))

    def app(self, rows: Rows) -> FastAPI:
        """The application, in a process of its own."""
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it would log every malformed form
        for plugin in self.plugins:
            load_plugin(plugin)
        module, _, name = self.factory.partition(":")
        made: FastAPI = getattr(import_module(module), name)(**self.words, rows=rows)
        return made


class SharedRows:
    """The rows of all workers, in a file's memory that they share."""

    def __init__(self, file: int, at: int, workers: int) -> None:
        self._memory = mmap.mmap(file, workers * ROW_BYTES)
        self._rows = [memoryview(self._memory)[k * ROW_BYTES : (k + 1) * ROW_BYTES].cast("d") for k in range(workers)]
        self.own: Row = self._rows[at]

    async def all(self) -> Sequence[Row | np.ndarray]:
        return self._rows

    def died(self, at: int) -> None:
        """What a worker that is gone had inside is no more."""
        forget_moment(self._rows[at])


class WorkerProcess:
    """One worker's process, as the parent sees it."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], line: int) -> None:
        self.number, self.process, self._line = number, process, line
        self.began, self.ready = time.monotonic(), False

    @property
    def ended(self) -> int | None:
        """Its exit code once it has ended; looks whether it has said that it is ready."""
        if not self.ready:
            with suppress(BlockingIOError):
                self.ready = bool(os.read(self._line, 1))
        return self.process.poll()

    @property
    def why(self) -> str:
        """How it ended, for people."""
        code = self.process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        os.close(self._line)


class Crew:
    """The workers of one server."""

    def __init__(self, job: Job, count: int, listening: socket.socket) -> None:
        self.job, self.count, self.listening = job, count, listening
        self.stopping = False
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._file.truncate(count * ROW_BYTES)
        self.rows = SharedRows(self._file.fileno(), 0, count)
        self._lifeline, self._held = os.pipe()  # workers see its end when this process is gone
        self.workers: list[WorkerProcess] = []
        self._short_lives = 0
        self._due: dict[int, float] = {}  # when which worker is to be started

    def start(self, number: int) -> WorkerProcess:
        """Start one worker; it says that it is ready over a line of its own."""
        line, theirs = os.pipe()
        os.set_blocking(line, False)
        files = {"listening": self.listening.fileno(), "rows": self._file.fileno(), "lifeline": self._lifeline}
        told = {**asdict(self.job), **files, "ready": theirs, "at": number, "workers": self.count}
        words = [sys.executable, "-P", "-c", WORK, json.dumps(told)]
        # a session of its own: Ctrl-C in a terminal reaches the parent alone, which passes it on
        process = subprocess.Popen(words, pass_fds=(*files.values(), theirs), start_new_session=True)
        os.close(theirs)
        worker = WorkerProcess(number, process, line)
        self.workers.append(worker)
        if self.stopping:  # a signal came before this one was among them
            process.send_signal(signal.SIGTERM)
        return worker

    def start_all(self) -> None:
        """Start them and wait until all are ready; the first alone, so that what is wrong is said once."""
        for numbers in ([0], range(1, self.count)):
            started = [self.start(number) for number in numbers if not self.stopping]
            while not self.stopping and not all(worker.ready for worker in started):
                time.sleep(LOOK_S)
                for worker in started:
                    if worker.ended is not None and not self.stopping:
                        raise _NotStarted(worker)

    def look_after(self) -> None:
        """Replace those that die, until told to stop."""
        while not self.stopping:
            for worker in [one for one in self.workers if one.ended is not None]:
                self._replace(worker)
            for number in [number for number, due in self._due.items() if due <= time.monotonic()]:
                del self._due[number]
                self.start(number)
            time.sleep(LOOK_S)

    def _replace(self, worker: WorkerProcess) -> None:
        self.workers.remove(worker)
        worker.close()
        self.rows.died(worker.number)
        steady = time.monotonic() - worker.began >= STEADY_S
        self._short_lives = 0 if steady else self._short_lives + 1
        wait_s = (
            0.0 if self._short_lives <= self.count else min(2.0 ** (self._short_lives - self.count), LONGEST_WAIT_S)
        )
        when = "another takes its place" if not wait_s else f"another takes its place in {wait_s:.0f} s"
        say(f"worker {worker.number + 1} of {self.count} ended with {worker.why}; {when}")
        self._due[worker.number] = time.monotonic() + wait_s

    def pass_on(self, signum: int, frame: Any) -> None:
        """A signal: every worker gets it; nobody is replaced any more."""
        self.stopping = True
        for worker in self.workers:
            if worker.ended is None:  # one that still starts is just ended
                worker.process.send_signal(signum if worker.ready else signal.SIGTERM)

    def end(self) -> list[WorkerProcess]:
        """Wait for all workers; those that did not end well."""
        self.listening.close()  # workers have it still, and take what came before
        until = time.monotonic() + END_S
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        return [worker for worker in self.workers if worker.ended and worker.ready]

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
            worker.close()
        os.close(self._held)
        os.close(self._lifeline)
        self._file.close()


class _NotStarted(Exception):
    def __init__(self, worker: WorkerProcess) -> None:
        super().__init__(f"worker {worker.number + 1} did not start: it ended with {worker.why}")
        self.worker = worker


def run_processes(job: Job, count: int, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve with so many workers until SIGTERM or SIGINT; then they take no more and finish what is inside."""
    with listen(host, port) as listening, _crew(Crew(job, count, listening)) as crew:
        where = address_of(host, listening.getsockname()[1])
        try:
            crew.start_all()
            if not crew.stopping:
                say(f"serving on {where} with {count} workers (Ctrl-C stops)")
            crew.look_after()
            bad = crew.end()
        except _NotStarted as error:
            if error.worker.process.returncode == 2:  # it has said why
                raise SystemExit(2) from error
            raise ValueError(str(error)) from error
    for worker in bad:
        say(f"worker {worker.number + 1} of {count} ended with {worker.why}")
    if bad:
        raise SystemExit(1)
    console.print("stopped")


@contextmanager
def _crew(crew: Crew) -> Iterator[Crew]:
    """Signals are the crew's meanwhile; none of its workers stays behind."""
    before = {s: signal.signal(s, crew.pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield crew
    finally:
        crew.close()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def work() -> None:
    """The main function of a worker's process, which finds in its last word what it is told."""
    told = json.loads(sys.argv[-1])
    log_to_console()
    quiet_pillow()
    try:
        with explained():
            job = Job(told["factory"], told["words"], told["plugins"])
            app = job.app(SharedRows(told["rows"], told["at"], told["workers"]))
    except (ValueError, OSError, MissingExtra) as error:
        print(f"offramp: {error}", file=sys.stderr)
        sys.exit(2)
    listening = socket.socket(fileno=told["listening"])
    server = WorkerServer(app, told["ready"], told["lifeline"])
    with signals_stay_here(server):
        server.run([listening])
    sys.exit(server.failed)


class WorkerServer(Server):
    """Tells its parent when it is ready, and ends when the parent is gone or no stage can run any more."""

    def __init__(self, app: FastAPI, ready: int, lifeline: int) -> None:
        super().__init__(server_config(app), lambda: os.close(ready) if os.write(ready, b"r") else None, alone=False)
        self.stages = app.state.service.worker
        self.lifeline, self.failed = lifeline, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(self.lifeline, self._orphaned)

    def _orphaned(self) -> None:
        asyncio.get_running_loop().remove_reader(self.lifeline)
        self.handle_exit(signal.SIGTERM, None)

    async def on_tick(self, counter: int) -> bool:
        if not self.should_exit and not self.stages.alive:
            self.failed = self.should_exit = True
        return await super().on_tick(counter)
