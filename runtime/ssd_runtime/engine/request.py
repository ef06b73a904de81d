"""A prompt that an engine decodes together with others."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_runtime.engine.job import Job
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.result import Outcome
from ssd_runtime.engine.turn import Turn, naming


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt with its own settings; `Engine.step` advances it."""

    turn: Turn
    job: Job[Generation]

    @property
    def done(self) -> bool:
        """Whether it has ended, failed or been cancelled."""
        return self.job.done

    def outcome(self) -> Outcome:
        """The answer with its figures, once the request is done. Raises the UserError that it failed with."""
        with naming(self.turn.prompt):
            return self.turn.outcome(self.job.ended())
