"""Timing several ways to decode the same prompts in turn, so that a drifting machine is fair to all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ssd_runtime.engine.loop import Generation, Limits, decode
from ssd_runtime.engine.session import Prefill, Session
from ssd_runtime.planning.plan import Planner

Contenders = Mapping[str, Callable[[], Planner]]
"""A name to what makes a planner for one request."""


def in_turn(
    session: Session, prompt: Prefill, contenders: Contenders, limits: Limits, turn: int = 0
) -> dict[str, Generation]:
    """Decode behind one prefilled prompt with each contender; `turn` rotates who goes first."""
    names = list(contenders)
    shift = turn % len(names)
    order = names[shift:] + names[:shift]
    done = {name: decode(session, prompt, contenders[name](), limits) for name in order}
    return {name: done[name] for name in names}
