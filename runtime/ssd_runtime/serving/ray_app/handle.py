"""The replicas of a deployment, through Ray Serve's handle of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.exceptions import RayActorError, RaySystemError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from ssd_runtime.serving.http.openai.errors import ApiError
from ssd_runtime.serving.ray_app.call import Call, Message
from ssd_runtime.serving.ray_app.router import ReplicaLost

LOOK_SECONDS = 10.0
"""Seconds within which replicas tell their state."""


class ServedReplicas:
    """Replicas that Ray Serve keeps running; it also chooses among them, by the conversation and by what is free."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._responding = handle.options(method_name="respond", stream=True)

    async def respond(self, call: Call) -> AsyncGenerator[list[Message]]:
        """Give a request to a replica. Raises ReplicaLost if it dies, and ApiError if no more requests may wait."""
        response: Any = self._responding.options(session_id=call.conversation).remote(call)
        complete = False
        try:
            async for messages in response:
                yield messages
            complete = True
        except BackPressureError:
            raise ApiError(429, "all places are taken; try again", code="rate_limit_exceeded", retry_after=1) from None
        except (RayActorError, RaySystemError) as error:
            raise ReplicaLost(str(error)) from None
        finally:
            if not complete:
                response.cancel()

    async def alive(self) -> bool:
        """Whether a replica takes requests."""
        return any(await self._told("alive"))

    async def metrics(self) -> Sequence[tuple[str, str]]:
        """The name of each replica and its metrics."""
        return await self._told("metrics")

    async def _told(self, method: str) -> list[Any]:
        """The answers of all replicas that are alive; empty if one does not answer in time."""
        try:
            told = await self._handle.broadcast(method).results_async(timeout_s=LOOK_SECONDS, return_exceptions=True)
        except Exception:  # no replica is there, or one is stalled, which Ray Serve soon replaces
            return []
        return [each for each in told if not isinstance(each, BaseException)]
