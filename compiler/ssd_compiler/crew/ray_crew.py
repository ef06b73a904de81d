"""A crew of workers on the hosts of a Ray cluster."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from ssd_artifacts.manifest import tool_version
from ssd_compiler.crew.actors import EventQueue, Slot
from ssd_compiler.crew.crew import Alone, Step
from ssd_compiler.crew.progress_display import Event, ProgressDisplay
from ssd_compiler.crew.worker import Worker, WorkerSetup
from ssd_compiler.stages import Stages
from ssd_compiler.workspace import NotFinished, Workspace
from ssd_profiles.errors import UserError
from ssd_profiles.latency import DeviceKey
from ssd_runtime.loading.models import weights_of

T = TypeVar("T")
MOST_DEATHS = 3
"""Workers that may die over one step of a domain."""
POLL_SECONDS = 0.25
PATIENCE_SECONDS = 30.0
"""Seconds after which the user is told what is waited for, and timed steps wait for no worker without a place."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the cluster. Ray gives each a resource of its own, of which there is 1: the host's slot."""

    address: str
    cores: int
    cards: int

    @property
    def slot(self) -> str:
        """The resource's name."""
        return f"node:{self.address}"


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """A worker as the crew sees it."""

    name: str
    host: Host
    actor: Any
    setup: WorkerSetup
    device: DeviceKey | None = None
    """The device that it times on; None until it has loaded the model."""
    busy: tuple[Any, str | None] | None = None
    """The reference that it works on, with the domain; None for the domain while it starts."""
    placed: Any = None
    """The reference that is there once Ray has found a place for it."""
    asked: float = 0.0
    """When it was told to start."""


class RayCrew(Alone):
    """Workers, some on every host, that run the steps of the domains.

    The workers of a compile hold a host's slot together, so that no other compile runs there. A timed step runs only
    where the device is the one that its latencies are of, while the other workers of that host wait; if no worker has
    that device, this process runs it. A step whose worker dies is done again, by the next that is free.
    """

    def __init__(self, stages: Stages, workers: int | None = None) -> None:
        """Use `workers` workers, or one per host (per card where the model is on one), when they are needed."""
        assert isinstance(stages.work, Workspace), "the process that writes the bundle keeps the results"
        super().__init__(stages)
        self._work: Workspace = stages.work
        self._count = workers
        self._crew: list[WorkerHandle] = []
        self._queue = _actor(EventQueue, num_cpus=0)
        self._deaths = Counter[str]()

    def each(
        self, step: Step[T], rows: Mapping[str, tuple[Any, ...]], timed_on: DeviceKey | None = None
    ) -> dict[str, T]:
        """Run a step of every domain as `Alone` does; those that are not finished run on the workers."""
        found = {name: result for name in rows for result in self._finished(step, rows[name])}
        left = {name: rows[name] for name in rows if name not in found}
        if left:
            self._start_workers()
            with ProgressDisplay(self._stages.reporter) as display:
                found |= self._spread(step, left, timed_on, display)
        if timed_on is not None and (left := {name: rows[name] for name in rows if name not in found}):
            self._stages.reporter.note(f"no worker runs on {timed_on.device}, so timing happens in this process")
            found |= {name: step(self._stages, *arguments) for name, arguments in left.items()}
        return {name: found[name] for name in rows}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the slot of this process' host; the crew must not have begun."""
        assert not self._crew, "the workers of this host would run beside it"
        address = ray.util.get_node_ip_address()
        slot = _actor(Slot, num_cpus=0, resources={f"node:{address}": 1.0})
        try:
            self._wait_for([slot.hold.remote()], f"waiting for {address}, which another compile may be using")
            yield
        finally:
            ray.kill(slot)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._crew:
            ray.kill(worker.actor)
        if error is None:
            ProgressDisplay(self._stages.reporter).show(self._events())
        ray.kill(self._queue)

    def _finished(self, step: Step[T], arguments: tuple[Any, ...]) -> list[T]:
        """The result of a step whose stage has a stored result, as a list; else an empty one."""
        try:
            return [step(replace(self._stages, work=_Finished(self._work)), *arguments)]
        except NotFinished:
            return []

    def _spread(
        self, step: Step[T], rows: Mapping[str, tuple[Any, ...]], timed_on: DeviceKey | None, display: ProgressDisplay
    ) -> dict[str, T]:
        """Run a step of every domain on the workers; returns the results, without those that no worker can time."""
        found = dict[str, T]()
        waiting = deque(rows)
        while len(found) < len(rows):
            if timed_on is not None and all(worker.device != timed_on for worker in self._crew):
                self._forget_late()
                if all(worker.device is not None for worker in self._crew):
                    break
            for worker in self._crew:
                if waiting and self._is_free(worker, timed_on):
                    name = waiting.popleft()
                    sent = worker.actor.run.remote(step.__name__, rows[name], timed_on is not None)
                    worker.busy = sent, name
            for worker in self._wait():
                result, again = self._answer(worker, step)
                if result is not None:
                    found[result[0]] = result[1]
                elif again is not None:
                    waiting.append(again)
            display.show(self._events())
        return found

    def _is_free(self, worker: WorkerHandle, timed_on: DeviceKey | None) -> bool:
        """Whether a worker can take a step; for a timed one, all workers of its host must be idle."""
        if worker.busy is not None or worker.device is None:
            return False
        if timed_on is None:
            return True
        beside = (each for each in self._crew if each.host == worker.host)
        return worker.device == timed_on and all(each.busy is None for each in beside)

    def _wait(self) -> list[WorkerHandle]:
        """The workers that have answered."""
        busy = {worker.busy[0]: worker for worker in self._crew if worker.busy is not None}
        if not busy:
            raise UserError("--ray: all workers are lost; see `ray status`, and use --resume to go on")
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=POLL_SECONDS)
        return [busy[reference] for reference in ready]

    def _answer(self, worker: WorkerHandle, step: Step[T]) -> tuple[tuple[str, T] | None, str | None]:
        """Take a worker's answer: a domain and its result, or a domain whose step has to be done again."""
        assert worker.busy is not None, "it has answered"
        reference, name = worker.busy
        worker.busy = None
        try:
            answer = ray.get(reference)
        except RayTaskError as error:
            # Ray's own exception has its whole traceback for a message.
            raise (error.cause if isinstance(error.cause, UserError) else error.as_instanceof_cause()) from None
        except RayError:
            self._bury(worker, name, step)
            return None, name
        if name is None:
            worker.device = answer
            return None, None
        result, stages = answer
        for stage, value in stages.items():
            self._work.keep(stage, value)
        return (name, result), None

    def _bury(self, worker: WorkerHandle, name: str | None, step: Step[T]) -> None:
        """Wait for the worker that Ray starts in place of a dead one; forget it if there is none.

        Raises UserError if a step has killed too many.
        """
        if name is None:
            self._forget(worker)
            return
        task = f"{name}: {step.__name__}"
        self._deaths[task] += 1
        if self._deaths[task] >= MOST_DEATHS:
            raise UserError(f"{task}: {MOST_DEATHS} workers died over it, for want of memory perhaps; use fewer")
        self._stages.reporter.warn(f"{task}: {worker.name} died, so it is done again")
        self._start(worker)

    def _events(self) -> list[Event]:
        found: list[Event] = ray.get(self._queue.take.remote())
        return found

    def _forget(self, worker: WorkerHandle) -> None:
        self._crew.remove(worker)
        ray.kill(worker.actor)

    def _forget_late(self) -> None:
        """Forget the workers for which Ray has found no place in time."""
        for worker in [each for each in self._crew if monotonic() - each.asked > PATIENCE_SECONDS]:
            if not ray.wait([worker.placed], timeout=0)[0]:
                self._stages.reporter.note(f"{worker.name}: there is no room for it so far, so it is not waited for")
                self._forget(worker)

    def _start(self, worker: WorkerHandle) -> None:
        worker.device = None
        worker.asked = monotonic()
        worker.placed = worker.actor.__ray_ready__.remote()
        queue = self._queue
        worker.busy = worker.actor.start.remote(worker.name, worker.setup, lambda event: queue.add.remote(event)), None

    def _start_workers(self) -> None:
        """Start the workers, once."""
        if self._crew:
            return
        hosts = _hosts()
        on_cards = self._stages.decoder.device.type != "cpu"
        per_host = _workers_of(hosts, self._count, on_cards)
        if self._count is not None and self._count > sum(per_host):
            self._stages.reporter.note(f"--workers {self._count}: the hosts have room for {sum(per_host)}")
        threads = torch.get_num_threads()
        for host, count in zip(hosts, per_host, strict=True):
            for _ in range(count):
                name = f"worker {len(self._crew) + 1} on {host.address}"
                actor = _actor(
                    Worker,
                    num_cpus=max(1, host.cores // count),
                    num_gpus=int(on_cards),
                    resources={host.slot: int(10_000 / count) / 10_000},
                    max_restarts=MOST_DEATHS,
                )
                setup = self._setup(max(1, threads // count), threads)
                self._crew.append(WorkerHandle(name, host, actor, setup))
        for worker in self._crew:
            self._start(worker)
        placed = [worker.placed for worker in self._crew]
        self._wait_for(
            placed, "waiting for hosts that have room for workers (cores, cards and slots): see `ray status`"
        )

    def _wait_for(self, references: list[Any], why: str) -> None:
        """Wait for one of some references; if that takes long, tell the user why."""
        if not ray.wait(references, timeout=PATIENCE_SECONDS)[0]:
            self._stages.reporter.note(why)
            ray.wait(references)

    def _setup(self, threads: int, timed_threads: int) -> WorkerSetup:
        settings = self._stages.settings
        return WorkerSetup(
            settings=settings,
            fingerprint=self._stages.fingerprint,
            version=tool_version(),
            weights=settings.weights or weights_of(self._stages.base, settings.model, settings.device, settings.dtype),
            threads=threads,
            timed_threads=timed_threads,
        )


def _hosts() -> list[Host]:
    """The hosts of the cluster that can run workers, by address."""
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    hosts = [
        Host(node["NodeManagerAddress"], int(node["Resources"]["CPU"]), int(node["Resources"].get("GPU", 0)))
        for node in alive
    ]
    if not hosts:
        raise UserError("--ray: no host of the cluster has a core to work on; see `ray status`")
    return sorted(hosts, key=lambda host: host.address)


def _workers_of(hosts: Sequence[Host], asked: int | None, on_cards: bool) -> list[int]:
    """The number of workers on each host: as even as possible, at most one per core or card."""
    most = [host.cards if on_cards else host.cores for host in hosts]
    if asked is None:
        return most if on_cards else [1] * len(hosts)
    found = [0] * len(hosts)
    for _ in range(min(asked, sum(most))):
        free = [place for place, room in enumerate(most) if found[place] < room]
        found[min(free, key=lambda place: found[place])] += 1
    return found


def _actor(kind: type[Any], **options: Any) -> Any:
    """Start an actor of a class."""
    made: Any = ray.remote(**options)(kind)
    return made.remote()


class _Finished:
    """The stored results of stages, none of which is computed."""

    def __init__(self, work: Workspace) -> None:
        self._work = work

    def stage(self, name: str, compute: Any) -> Any:
        """The stored result. Raises NotFinished if there is none."""
        return self._work.finished(name)

    def file(self, name: str, compute: Any) -> Any:
        """Raise NotFinished: no step of a domain keeps files."""
        raise NotFinished(name)
