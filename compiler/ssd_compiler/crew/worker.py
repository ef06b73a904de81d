"""A worker: a process with the model, which runs steps of a compile for another process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_artifacts.manifest import tool_version
from ssd_compiler.crew.progress_display import Event
from ssd_compiler.decoder import add_copies, faithful_decoder
from ssd_compiler.progress import Reporter, Tick
from ssd_compiler.settings import CompileSettings
from ssd_compiler.stages import Stages
from ssd_profiles.errors import UserError
from ssd_profiles.latency import DeviceKey
from ssd_runtime.loading.models import load_model
from ssd_runtime.profiling.latency import device_key

REPORT_SECONDS = 0.2
"""Least seconds between two reports of a stage's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """All that a worker needs for the steps of a compile."""

    settings: CompileSettings
    fingerprint: ModelFingerprint
    version: str
    """Version of the program that compiles."""
    weights: str
    """The form in which the weights are loaded: packed or dense."""
    threads: int
    """Threads beside the other workers of the host."""
    timed_threads: int
    """Threads of timed steps, which run alone."""


class Worker:
    """Runs steps. Ray makes one in a process of its own."""

    def __init__(self) -> None:
        self._stages: Stages | None = None

    def start(self, name: str, setup: WorkerSetup, send: Callable[[Event], object]) -> DeviceKey:
        """Load the model; returns the device that timed steps run on.

        Raises UserError if the model is another one here, or if this program has another version.
        """
        self._setup = setup
        settings = setup.settings
        host = socket.gethostname()
        if tool_version() != setup.version:
            raise UserError(f"--ray: {host} has version {tool_version()}, this machine {setup.version}; install one")
        torch.set_num_threads(setup.threads)
        loaded = load_model(settings.model, settings.device, settings.dtype, setup.weights, settings.allow_special)
        found = loaded.fingerprint()
        if not setup.fingerprint.serves(found) or setup.fingerprint.dtype != found.dtype:
            raise UserError(
                f"--ray: {settings.model} is another model on {host}, or of another dtype ({found.dtype}, not "
                f"{setup.fingerprint.dtype}); give the same files to all hosts, and --dtype"
            )
        decoder = faithful_decoder(loaded, settings.weight_memory)
        # The command has told of the copies already.
        add_copies(decoder, settings, Reporter(Console(quiet=True)))
        self._stages = Stages(
            settings=settings,
            loaded=loaded,
            decoder=decoder,
            fingerprint=setup.fingerprint,
            work=Results(),
            reporter=EventReporter(name, send),
        )
        with self._threads(timed=True):
            return device_key(decoder)

    def run(self, step: str, arguments: tuple[Any, ...], timed: bool) -> tuple[Any, dict[str, Any]]:
        """Run a step of `Stages`; returns its result, and the results of its stages by name."""
        assert self._stages is not None, "start() comes first"
        results = Results()
        stages = replace(self._stages, work=results)
        with self._threads(timed):
            return getattr(stages, step)(*arguments), results.found

    @contextmanager
    def _threads(self, timed: bool) -> Iterator[None]:
        torch.set_num_threads(self._setup.timed_threads if timed else self._setup.threads)
        try:
            yield
        finally:
            torch.set_num_threads(self._setup.threads)


class Results:
    """Keeps the results of stages until they are sent."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def stage(self, name: str, compute: Callable[[], Any]) -> Any:
        """Compute a stage's result, and keep it."""
        if name not in self.found:
            self.found[name] = compute()
        return self.found[name]

    def file(self, name: str, compute: Callable[[], bytes]) -> Path:
        """Raise NotImplementedError: files stay on the machine that writes the bundle."""
        raise NotImplementedError(name)


class EventReporter(Reporter):
    """Reports to the process that compiles."""

    def __init__(self, name: str, send: Callable[[Event], object]) -> None:
        super().__init__()
        self._worker = name
        self._send = send

    def note(self, text: str) -> None:
        """Send information."""
        self._send(Event(self._worker, "note", text))

    def warn(self, text: str) -> None:
        """Send a warning."""
        self._send(Event(self._worker, "warning", text))

    @contextmanager
    def stage(self, title: str, total: int | None) -> Iterator[Tick]:
        """Send the beginning, the steps and the end of a stage."""
        self._send(Event(self._worker, "begin", title, total=total))
        began = sent = perf_counter()
        steps = 0

        def tick() -> None:
            nonlocal steps, sent
            steps += 1
            if perf_counter() - sent >= REPORT_SECONDS:
                sent = perf_counter()
                self._send(Event(self._worker, "steps", title, total=steps))

        yield tick
        self._send(Event(self._worker, "end", title, seconds=perf_counter() - began))
