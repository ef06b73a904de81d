"""Self-speculation for `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`."""

from __future__ import annotations

from functools import cache
from typing import Any

from ssd_runtime import CustomGenerate


@cache
def custom_generate(artifact: str | None, strategy: str) -> CustomGenerate:
    """The callable of a bundle and a strategy, which keeps the engine between calls."""
    return CustomGenerate(artifact, strategy)


def generate(
    model: Any,
    artifact: str | None = None,
    strategy: str = "auto",
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_model: Any = None,
    **arguments: Any,
) -> Any:
    """Decode as `model.generate` does, faster; `artifact` is what `Engine.open` takes.

    The other arguments are those of `generate`.
    """
    fast = custom_generate(artifact, strategy)
    return fast.generate(
        model, streamer=streamer, tokenizer=tokenizer, assistant_model=assistant_model, arguments=arguments
    )
