"""What runs beside a module's own `forward` when the user's model is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ssd_profiles.errors import UserError

LIBRARIES = ("transformers", "accelerate")
"""Whose hooks on a whole layer or model record or move and change no result."""


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its own `forward`."""
    # accelerate replaces `forward` on the instance instead of registering a hook.
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def require_unhooked(model: PreTrainedModel) -> None:
    """Raise UserError where a hook or a forward that is not transformers' own would be bypassed.

    Projections, norms and the embedding are called as they are, hooks and all. The blocks, layers and models around
    them never are: neither hooks on them nor a forward that a subclass or a patch of their class brings would run.
    """
    for name, part in _taken_apart(model):
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values(), type(part).forward]
        if "forward" in part.__dict__ and not hasattr(part, "_hf_hook"):
            hooks.append(part.__dict__["forward"])
        if any(_home(hook).partition(".")[0] not in LIBRARIES for hook in hooks):
            raise UserError(
                f"model: {name} has a hook or a forward of its own, which decoding layer by layer would bypass; "
                "remove it, or put it on projections or norms"
            )


def _taken_apart(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    yield "the model", model
    yield "model", model.model
    for index, layer in enumerate(model.model.layers):
        yield f"layers.{index}", layer
        yield f"layers.{index}.self_attn", layer.self_attn
        yield f"layers.{index}.mlp", layer.mlp


def _home(hook: Callable[..., Any]) -> str:
    """The module that a hook was written in."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)
