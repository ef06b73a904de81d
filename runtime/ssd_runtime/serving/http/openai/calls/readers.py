"""Picks the reader of a form of calls."""

from __future__ import annotations

from ssd_runtime.serving.http.openai.calls.call_forms import CallForm, ElementCall, ToolSchemas
from ssd_runtime.serving.http.openai.calls.element_reader import ElementReader
from ssd_runtime.serving.http.openai.calls.json_reader import JsonReader
from ssd_runtime.serving.http.openai.calls.tool_calls import CallReader


def reader_of(form: CallForm, tools: ToolSchemas, most: int | None = None) -> CallReader:
    """The reader of one answer's calls of `tools` in a form as answers show it; calls after `most` are dropped."""
    if isinstance(form.call, ElementCall) and form.opening.strip():
        return ElementReader(form, form.call, dict(tools), most)
    return JsonReader(form, [name for name, _ in tools], most)
