"""Reads the kinds of a model's layers, and their settings, from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ssd_profiles.errors import UserError
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.mixers.mixer import Mixer

SCALED = "scaled"
"""A rotary embedding with factors for its angles, the same for sequences of every length."""
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional", SCALED})
"""Rotary embeddings whose angles depend on the position alone, so that a table can hold them."""
LONGROPE = "longrope"
"""The rotary embedding with one set of angles for sequences within the original context and another for longer ones."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A layer's mixer, or the window and the rotation of its attention; layers of a kind share views and latencies."""

    name: str
    """`full` or `sliding` attention, `full_shared` or `sliding_shared` with another layer's keys, or the mixer's."""
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Number of rows that a row sees, itself included; None for all."""
    rope: str | None = "default"
    """Name of the layer's rotary embedding; None for no rotation."""
    mixer: type[Mixer] | None = None
    """The mixer of such a layer; None for attention."""
    shares: bool = False
    """Whether it reads an earlier layer's keys and has none of its own."""

    @property
    def is_full(self) -> bool:
        """Whether its rows attend to all before them."""
        return self.mixer is None and self.window is None


def layer_kinds(config: PreTrainedConfig, family: Family) -> list[LayerKind]:
    """The kind of every layer."""
    rotated = _by_layer(config, family.no_rope) if family.no_rope else []
    kinds = []
    mixers = dict(family.mixers)
    ropes = rope_parameters(config, family)
    windowed = family.rope_in_windows and config.sliding_window is not None
    owners = key_owners(config, family)
    for layer, layer_type in enumerate(layer_types(config, family)):
        kv_heads, head_dim = key_heads(config, layer)
        if (mixer := mixers.get(layer_type)) is not None:
            kinds.append(LayerKind(mixer.name, kv_heads, head_dim, rope=None, mixer=mixer))
            continue
        slides = layer_type == "sliding_attention"
        rope: str | None = layer_type if _differ_by_layer(config, family) else "default"
        if (rotated and not rotated[layer]) or (windowed and not slides) or not ropes:
            rope = None
        shares = owners[layer] != layer
        name = ("sliding" if slides else "full") + ("_shared" if shares else "")
        name += "" if family.parallel is None else f"_{family.parallel.name}"
        window = config.sliding_window if slides else None
        kinds.append(LayerKind(name, kv_heads, head_dim, window, rope, shares=shares))
    return kinds


def rope_types(config: PreTrainedConfig, family: Family) -> dict[str, str]:
    """The types of the model's rotary embeddings by name; a single one is called `default`.

    A longrope with one set of factors for all lengths is `scaled`: its angles depend on the position alone.
    """
    ropes = rope_parameters(config, family)
    return {name: _rope_type(parameters, family) for name, parameters in ropes.items()}


def key_heads(config: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """The number and the size of a layer's key-value heads."""
    by_layer = getattr(config, "per_layer_config", None)
    own = by_layer[layer] if by_layer else config
    return own.num_key_value_heads, getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads


def key_owners(config: PreTrainedConfig, family: Family) -> list[int]:
    """The layer whose keys each layer's attention reads: itself, unless the family's `shared_keys` says otherwise."""
    types = layer_types(config, family)
    first = len(types) - int(setting(config, family.shared_keys) or 0)
    before = {kind: layer for layer, kind in enumerate(types[: max(first, 0)])}
    if missing := set(types) - set(before):
        raise UserError(f"model: layers share the keys of no earlier layer of type {', '.join(sorted(missing))}")
    return [layer if layer < first else before[kind] for layer, kind in enumerate(types)]


def query_scaling(config: PreTrainedConfig, family: Family) -> tuple[float, int] | None:
    """The beta and the original context of queries that grow with their position; None for those that do not."""
    parameters = rope_parameters(config, family).get("default", {})
    beta = parameters.get("llama_4_scaling_beta") if family.query_scaling else None
    return (float(beta), int(parameters["original_max_position_embeddings"])) if beta else None


def setting(config: PreTrainedConfig, name: str | None) -> float | None:
    """A number of the config; None if the family has no such setting or the model does not use it."""
    value = getattr(config, name, None) if name else None
    return None if value is None else float(value)


def rope_parameters(config: PreTrainedConfig, family: Family) -> dict[str, dict[str, Any]]:
    """The parameters of each of the model's rotary embeddings, by name."""
    if family.rope_setting is not None and getattr(config, family.rope_setting) != "rope":
        return {}
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if not _differ_by_layer(config, family):
        return {"default": parameters}
    return {name: parameters.get(name) or {} for name in sorted(set(layer_types(config, family)))}


def unread_rope_parameters(config: PreTrainedConfig, family: Family) -> list[str]:
    """The parameters of all layers that no layer type's rotary embedding has.

    transformers adds those of layer types to parameters that an earlier version saved, and then reads these alone.
    """
    if not _differ_by_layer(config, family):
        return []
    own = [each for each in config.rope_parameters.values() if isinstance(each, dict)]
    flat = {name: value for name, value in config.rope_parameters.items() if not isinstance(value, dict)}
    return [name for name, value in flat.items() if value not in [each.get(name) for each in own]]


def _differ_by_layer(config: PreTrainedConfig, family: Family) -> bool:
    """Whether layer types have rotary embeddings of their own; OLMo-3 has one in the first 5.x of transformers."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_type = "rope_type" not in parameters or any(isinstance(each, dict) for each in parameters.values())
    return family.rope_by_layer and by_type


def _rope_type(parameters: dict[str, Any], family: Family) -> str:
    found = str(parameters.get("rope_type", "default"))
    if family.fixed_alpha and found == "dynamic" and parameters.get("alpha"):
        return SCALED
    same = parameters.get("short_factor") == parameters.get("long_factor")
    return SCALED if found == LONGROPE and same and parameters.get("attention_factor") is not None else found


def layer_types(config: PreTrainedConfig, family: Family) -> list[str]:
    """The type of every layer, by its name in configs."""
    if family.windows == "by_layer" and (listed := _by_layer(config, "layer_types")):
        return listed
    slides = family.windows == "everywhere" and getattr(config, "sliding_window", None)
    return ["sliding_attention" if slides else "full_attention"] * int(config.num_hidden_layers)


def _by_layer(config: PreTrainedConfig, name: str) -> list[Any]:
    """The entries of a list that has one for every layer; empty without the list.

    A model whose last layers were cut may still have theirs. Raises UserError if a layer has none.
    """
    listed, count = getattr(config, name, None) or [], int(config.num_hidden_layers)
    if listed and len(listed) < count:
        raise UserError(f"model: {name} in its config: expected {count} entries, got {len(listed)}")
    return list(listed[:count])
