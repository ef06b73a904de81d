"""The crew of a compile runs the steps of each domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self, TypeVar

from ssd_compiler.stages import Stages
from ssd_profiles.latency import DeviceKey

T = TypeVar("T")
Step = Callable[..., T]
"""A method of `Stages` that keeps the result of one stage."""


class Alone:
    """Runs steps in this process, one domain after the other. It is entered for the length of a compile."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def each(
        self, step: Step[T], rows: Mapping[str, tuple[Any, ...]], timed_on: DeviceKey | None = None
    ) -> dict[str, T]:
        """Run a step of every domain with its arguments; returns the results by domain, in the order of `rows`.

        Steps that are `timed_on` a device run there alone on their host.
        """
        names = self._stages.reporter.domains(list(rows), step.__name__)
        return {name: step(self._stages, *rows[name]) for name in names}

    def alone(self) -> AbstractContextManager[object]:
        """A block in which nothing else of any compile runs on this host, so that it can be timed."""
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


MakeCrew = Callable[[Stages], Alone]
