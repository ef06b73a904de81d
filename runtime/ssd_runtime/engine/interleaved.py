"""Decodes the same prompt in several ways in turn, so that a drifting machine is fair to all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ssd_runtime.engine.loop import Generation, Limits, decode
from ssd_runtime.engine.session import Prefill, Session
from ssd_runtime.planning.plan import Planner

Contenders = Mapping[str, Callable[[], Planner]]
"""Names, each with a maker of one request's planner."""


def in_turn(
    session: Session, prompt: Prefill, contenders: Contenders, limits: Limits, turn: int = 0
) -> dict[str, Generation]:
    """Decode after one prefilled prompt with each contender; `turn` rotates the order."""
    names = list(contenders)
    shift = turn % len(names)
    order = names[shift:] + names[:shift]
    done = {name: decode(session=session, prompt=prompt, planner=contenders[name](), limits=limits) for name in order}
    return {name: done[name] for name in names}
