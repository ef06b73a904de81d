"""The replicas of a deployment, through Ray Serve's handle of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from ssd_runtime.serving.http.openai.errors import ApiError
from ssd_runtime.serving.ray_app.call import Call, ReplicaLost

LOOK_SECONDS = 5.0
"""Seconds within which replicas tell their state."""


class ServedReplicas:
    """Replicas that Ray Serve keeps running; it also chooses among them, by the conversation and by what is free."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._responding = handle.options(method_name="respond", stream=True)
        self._metrics: Sequence[tuple[str, str]] = ()
        """The latest known."""

    async def respond(self, call: Call) -> AsyncGenerator[list[Message]]:
        """Give a request to a replica, its conversation's if that has a place; yields the messages of its response.

        Raises ReplicaLost if the replica dies, and ApiError if no more requests may wait.
        """
        response: Any = self._responding.options(session_id=call.conversation).remote(call)
        complete = False
        try:
            async for messages in response:
                yield messages
            complete = True
        except BackPressureError:
            raise ApiError(429, "all places are taken; try again", code="rate_limit_exceeded", retry_after=1) from None
        except (RayTaskError, TaskCancelledError):
            raise
        except RayError as error:
            raise ReplicaLost(str(error)) from None
        finally:
            if not complete:
                with suppress(Exception):  # of a response that failed, this raises its error again
                    response.cancel()

    async def alive(self) -> bool:
        """Whether a replica takes requests; one whose places are all taken answers late, and does."""
        try:
            return any(await self._told("alive"))
        except TimeoutError:
            return True

    async def metrics(self) -> Sequence[tuple[str, str]]:
        """The name of each replica and its metrics, in Prometheus' text format.

        They are the latest known ones where all places of a replica are taken.
        """
        with suppress(TimeoutError):
            self._metrics = await self._told("metrics")
        return self._metrics

    async def _told(self, method: str) -> list[Any]:
        """The answers of all replicas; none where none is there.

        Raises TimeoutError if one does not answer in time: it waits for a place, or is stalled, and Ray Serve soon
        replaces it.
        """
        try:
            told = await self._handle.broadcast(method).results_async(timeout_s=LOOK_SECONDS, return_exceptions=True)
        except TimeoutError:
            raise
        except Exception:  # no replica is there
            return []
        return [each for each in told if not isinstance(each, BaseException)]
