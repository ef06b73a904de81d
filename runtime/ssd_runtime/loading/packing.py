"""The places in a transformers model of what packed weights stand for: its projections and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from ssd_runtime.model.family.family import Family
from ssd_runtime.model.family.layer_kinds import LayerKind, layer_kinds
from ssd_runtime.model.layer.experts import are_transposed
from ssd_runtime.model.layer.layer import present
from ssd_runtime.model.layer.layer_inputs import INJECTION
from ssd_runtime.weights.kernels.kernel import Kernel
from ssd_runtime.weights.native.library import library
from ssd_runtime.weights.packed_linear import PackedEmbedding, PackedExperts, PackedLinear

EMBEDDINGS = ("model.embed_tokens", "model.embed_tokens_per_layer")
MODEL_PROJECTION = "model.per_layer_model_projection"
"""The projection of all layers' inputs (`LayerInputs`)."""
EXPERT: tuple[tuple[str, ...], ...] = (("gate_proj", "up_proj"), ("down_proj",))
"""Projections of each of `PackedExperts`; those side by side share an input."""


def pack(model: PreTrainedModel, family: Family, place: Callable[[list[str]], None]) -> None:
    """Call `place` with the names of projections that share an input, for all of a model's projections.

    Experts are made single ones before, without memory.
    """
    found = library()

    def place_all(runs: list[list[str]]) -> None:
        # A thread per layer: threads of torch's that share one of its small operations wait for each other, beside busy
        # processes ten times as long.
        with torch.inference_mode(), nullcontext() if found is None else found.torch_alone():
            for names in runs:
                place(names)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for placed in [pool.submit(place_all, each) for each in _all_projections(model, family)]:
            placed.result()


def _all_projections(model: PreTrainedModel, family: Family) -> list[list[list[str]]]:
    """The names of a model's projections: those beside the layers, then those of each layer (`_projections`)."""
    kinds = layer_kinds(model.config, family)
    layers = [_projections(model, family, f"model.layers.{number}", kind) for number, kind in enumerate(kinds)]
    if hasattr(model, "mtp"):
        full = next(kind for kind in kinds if kind.is_full)
        layers.append([["mtp.fc"], *_projections(model, family, "mtp.layers.0", full)])
    has_inputs = hasattr(model.model, MODEL_PROJECTION.removeprefix("model."))
    return [[["lm_head"], *([[MODEL_PROJECTION]] if has_inputs else [])], *layers]


def _projections(model: nn.Module, family: Family, layer: str, kind: LayerKind) -> list[list[str]]:
    """The names of a layer's projections; those side by side share an input. Experts are made single ones first."""
    mixer = kind.mixer
    mixing, shared, output = (
        ("self_attn", family.qkv, family.output) if mixer is None else (mixer.module, mixer.projections, mixer.output)
    )
    shared = present(model.get_submodule(f"{layer}.{mixing}"), shared)
    found = [[f"{layer}.{mixing}.{name}" for name in names] for names in (shared, (output,))]
    if (beside := family.parallel) is not None:
        found += [
            [f"{layer}.{beside.module}.{name}" for name in names] for names in (beside.projections, (beside.output,))
        ]
    found += [[f"{layer}.{name}"] for name in INJECTION] if hasattr(model.get_submodule(layer), INJECTION[0]) else []
    block = layer if family.beside else f"{layer}.{family.mlp}"
    is_mixture = family.router is not None and hasattr(model.get_submodule(block), family.router)
    blocks = dict.fromkeys(_single_experts(model, block) if is_mixture else (), EXPERT)
    alone = family.shared if is_mixture and not family.beside else family.mlp
    blocks |= {f"{layer}.{alone}": (family.gate_up, (family.down,))} if alone else {}
    return found + [[f"{block}.{name}" for name in names] for block, lists in blocks.items() for names in lists]


def _single_experts(model: nn.Module, block: str) -> list[str]:
    """Replace the experts of a block by single ones without memory, whose names are returned."""
    joined: Any = model.get_submodule(f"{block}.experts")
    count, hidden, inner = joined.down_proj.shape
    if are_transposed(joined.gate_up_proj, joined.down_proj):
        hidden, inner = inner, hidden
    sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    biased = hasattr(joined, "down_proj_bias")
    experts = [
        nn.ModuleDict({name: nn.Linear(*size, bias=biased, device="meta") for name, size in sizes.items()})
        for _ in range(count)
    ]
    replace(model, f"{block}.experts", PackedExperts(experts, joined))
    return [f"{block}.experts.{number}" for number in range(count)]


def replace_embedding(
    model: PreTrainedModel,
    name: str,
    stored: NDArray[np.uint8],
    dequantise: Callable[[NDArray[np.uint8]], NDArray[np.float32]],
) -> None:
    """Let an embedding read its rows from `stored` [vocabulary, bytes], with the factor that its module applies."""
    scale = getattr(model.get_submodule(name), "embed_scale", None)
    replace(model, name, PackedEmbedding(stored, dequantise, None if scale is None else float(scale)))


def share_kernel(
    model: PreTrainedModel,
    names: Sequence[str],
    kernel: Kernel,
    columns: Callable[[str, int], Tensor | None] = lambda _, count: None,
) -> None:
    """Let one kernel serve projections side by side; `columns` is the order of a projection's (`PackedLinear`)."""
    begin = 0
    for name in names:
        linear: Any = model.get_submodule(name)
        end = begin + linear.out_features
        replace(model, name, PackedLinear(kernel, begin, end, columns(name, linear.in_features)))
        begin = end


def fill(model: PreTrainedModel, numbers: Callable[[str, torch.Size], Tensor]) -> None:
    """Give all parameters without memory, and the buffers that checkpoints hold, their `numbers` in fp32."""
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            replace(model, name, nn.Parameter(numbers(name, parameter.shape), requires_grad=False))
    for name, buffer in buffers(model):
        buffer.copy_(numbers(name, buffer.shape))


def buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that checkpoints hold, which files hold as they do parameters."""
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def replace(model: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    """Set the module or parameter of this name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)
