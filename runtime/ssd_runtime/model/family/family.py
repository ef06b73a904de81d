"""The entry of a model family: the structure of its decoder layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ssd_runtime.model.family.factors import Factors
from ssd_runtime.model.mixers.mixer import Mixer


@dataclass(frozen=True, slots=True)
class Family:
    """The structure of a family's decoder layer. Every family calls its attention block `self_attn`."""

    title: str
    qk_norm: Literal["head", "projection", "rotated"] | None = None
    """Norm of queries and keys: of each head or of all heads as one vector before the rotation, of each head after it,
    or none."""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Names of the modules that norm queries and keys."""
    v_norm: str | None = None
    """Module of the norm of each head's values; None without one."""
    shared_keys: str | None = None
    """Setting: the number of last layers that read the keys of the last layer of their type before these, without keys
    of their own; None in families without such layers."""
    layer_inputs: str | None = None
    """Setting: the size of the vector that each layer receives for a row's token (`LayerInputs`); None without one."""
    layer_scalar: str | None = None
    """Buffer of a layer that its result is multiplied by; None without one."""
    norm_offset: float = 0.0
    """Number that is added to a norm's stored weight."""
    attention_norm: str | None = "input_layernorm"
    """Module of the norm before the attention block; None without one."""
    mlp_norm: str | None = "post_attention_layernorm"
    """Module of the norm before the MLP block; None without one."""
    attention_after: str | None = None
    """Module of the norm of the attention block's output; None without one."""
    mlp_after: str | None = None
    """Module of the norm of the MLP block's output; None without one."""
    final_norm: str = "norm"
    """Module of the norm before the head."""
    rotary: str = "rotary_emb"
    """Module of the rotary embedding."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Modules of queries, keys and values. A layer that reads another's keys has the first one alone; keys without a
    module of values are values, too."""
    output: str = "o_proj"
    """Module of attention's output projection."""
    gated: bool = False
    """Whether attention's output is gated: each head has a gate beside its query."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    gated_mlp: bool = True
    """Whether `gate_up` is a gate and what it multiplies, not one vector that the activation is applied to."""
    activation: str | None = "act_fn"
    """Module of the MLP's activation; None for SiLU without a module."""
    down: str = "down_proj"
    mlp: str = "mlp"
    """Module of the MLP block, or of the router with its experts."""
    router: str | None = None
    """The router's module in MLP blocks that have `experts`; None for a family without such blocks."""
    router_bias: str | None = None
    """Buffer of such a block that its router receives beside the rows; None without one."""
    shared: str | None = None
    """Path in a decoder layer of the expert that all rows go to, which is the MLP block of models without others
    (`num_local_experts` 0); None without one, as in models of such a family with a `shared_intermediate_size` of 0."""
    beside: tuple[str, str, str] | None = None
    """Norms in layers whose router and experts are modules of the layer itself, beside an MLP block that all rows go
    to, too: of the rows that experts receive, of their output and of that block's. The router receives rows before any
    norm. None where the MLP block has them."""
    shared_gate: str | None = None
    """Module whose output for a row, after a sigmoid, is the factor of that expert's output; None for 1."""
    mixers: tuple[tuple[str, type[Mixer]], ...] = ()
    """Mixers other than attention, by type in `config.layer_types`."""
    parallel: type[Mixer] | None = None
    """Mixer that runs beside the attention of every layer, on the same normed rows; None without one."""
    factors: Callable[[Any], Factors | None] | None = None
    """Takes a decoder layer and returns the factors of its projections' outputs; None for 1."""
    predicts_ahead: bool = False
    """Whether checkpoints may have a layer `mtp` that predicts the token after the next one (`Mtp`)."""
    windows: Literal["never", "by_layer", "everywhere"] = "never"
    """Layers with sliding attention: none, those of `config.layer_types`, or all if a window is set."""
    rope_by_layer: bool = False
    """Whether `config.rope_parameters` has one rotary embedding per layer type."""
    sinks: bool = False
    """Whether attention has a learnt score per head, `sinks`, that takes a share of the softmax and has no value."""
    pairs_alternate: bool = False
    """Whether the two columns that a rotation pairs are neighbours, not half of the rotated part apart."""
    fixed_alpha: bool = False
    """Whether a `dynamic` rotary embedding with an `alpha` has the same angles for sequences of every length."""
    angles_once: bool = False
    """Whether the rotary module returns an angle per pair of columns, not per column."""
    query_scaling: bool = False
    """Whether queries grow with their position: times 1 + beta log(1 + floor(position / original context)), where the
    rotary embedding's parameters have `llama_4_scaling_beta`."""
    rope_in_windows: bool = False
    """Whether only layers with a window have a rotation, in models with windows."""
    rope_setting: str | None = None
    """Setting that is `rope` in models with a rotation; None if all models have one."""
    no_rope: str | None = None
    """Setting that lists per layer whether there is a rotation; None if all layers have one."""
    longrope: bool = False
    """Whether the cache is computed again with other angles once a sequence outgrows the original context."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    attention_cap: str | None = None
    """Setting of the soft-cap of attention scores; this and the following are None without such a setting."""
    logit_cap: str | None = None
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    logit_divisor: str | None = None
    logit_multiplier: str | None = None
    unserved: tuple[str, ...] = ()
    """Settings that no field expresses; a model that has one other than 0 is refused."""

    @property
    def mixing(self) -> tuple[str, ...]:
        """The names of the modules that mix tokens in its layers."""
        beside = () if self.parallel is None else (self.parallel.module,)
        return ("self_attn", *beside, *(mixer.module for _, mixer in self.mixers))
