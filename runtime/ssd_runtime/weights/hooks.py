"""Detects code that runs besides a module's own `forward`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from ssd_profiles.errors import UserError

LIBRARIES = ("transformers", "accelerate", "ssd_runtime")
"""Packages whose hooks on whole layers or models never change a result."""


def hooked(module: nn.Module) -> bool:
    """Whether calling the module runs more than its own `forward`."""
    # accelerate replaces `forward` on the instance instead of registering a hook.
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def require_unhooked(model: PreTrainedModel, mixers: Sequence[str], mlp: str, shared: str | None = None) -> None:
    """Raise UserError when the model has hooks or a custom forward that the engine would bypass.

    Projections, norms and the embedding are called as modules, hooks included. Blocks, layers and the whole model are
    never called, so hooks on them or on all modules, or a forward of a subclass or patched class, would not run. Layers
    call their mixer by one of `mixers`, and their MLP block `mlp`; `shared` is the path of an expert of all rows.
    """
    everywhere = [*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()]
    everywhere = [hook for hook in everywhere if not _home(hook).startswith("torch.")]  # profilers' change nothing
    for name, part in _taken_apart(model, mixers, mlp, shared):
        hooks = [*everywhere, *part._forward_hooks.values(), *part._forward_pre_hooks.values(), type(part).forward]
        if "forward" in part.__dict__ and not hasattr(part, "_hf_hook"):
            hooks.append(part.__dict__["forward"])
        if any(_home(hook).partition(".")[0] not in LIBRARIES for hook in hooks):
            raise UserError(
                f"model: {name} has a hook or a forward of its own, which decoding layer by layer would bypass; "
                "remove it, or put it on projections or norms"
            )


def made_of(model: PreTrainedModel) -> tuple[object, ...]:
    """The parts of a model that a decoder takes as fixed: dtype, mode, `forward`, rotary embedding and layers.

    Adapters are put inside of layers, and change none of these.
    """
    rotary = getattr(model.model, "rotary_emb", None)
    return model.dtype, model.training, vars(model).get("forward"), rotary, *model.model.layers


def _taken_apart(
    model: PreTrainedModel, mixers: Sequence[str], mlp: str, shared: str | None
) -> Iterator[tuple[str, nn.Module]]:
    yield "the model", model
    yield "model", model.model
    for index, layer in enumerate(model.model.layers):
        yield f"layers.{index}", layer
        for path in (*mixers, mlp, "experts", f"{mlp}.experts", *([] if shared is None else [shared])):
            part: Any = layer
            for name in path.split("."):
                part = getattr(part, name, None)
            if part is not None:  # some layers have no experts, or another mixer
                yield f"layers.{index}.{path}", part


def _home(hook: Callable[..., Any]) -> str:
    """Name of the module in which a hook was defined."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)
