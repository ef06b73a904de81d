"""A prompt that an engine decodes together with others."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_runtime.engine.job import Job
from ssd_runtime.engine.offline.result import Outcome
from ssd_runtime.engine.offline.runner import Runner, Turn, naming
from ssd_runtime.engine.output.generation import Generation


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt with its own settings; `Engine.step` advances it."""

    runner: Runner
    turn: Turn
    job: Job[Generation]

    @property
    def done(self) -> bool:
        """Whether it has ended, failed or been cancelled."""
        return self.job.done

    def outcome(self) -> Outcome:
        """The answer with its figures, once the request is done. Raises the UserError that it failed with."""
        with naming(self.turn.prompt):
            return self.runner.outcome(self.turn, self.job.ended())
