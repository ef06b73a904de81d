"""The tools of a request, and the one that its answer must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ssd_runtime.serving.http.openai.requests.messages import Name, Strict


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema, which the template shows to the model."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of a function."""

    name: Name


class NamedTool(Strict):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: NamedFunction
