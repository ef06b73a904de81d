"""The tools of a request, and the one that its answer must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ssd_runtime.serving.http.openai.calls.call_forms import MOST_NAME
from ssd_runtime.serving.http.openai.requests.messages import BoundedModel, Name


class Function(BoundedModel):
    """A function that the model may call; `parameters` is a JSON schema, which the template shows to the model.

    Names have the letters of OpenAI's, and `.` and `:`, which the readers of calls know.
    """

    name: Annotated[str, Field(pattern=rf"^[A-Za-z0-9_.:-]{{1,{MOST_NAME}}}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BoundedModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(BoundedModel):
    """The name of a function."""

    name: Name


class NamedTool(BoundedModel):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: NamedFunction
