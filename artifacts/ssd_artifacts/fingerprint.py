"""The identity of a model by content: its configuration, tokenizer and weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, Field

from ssd_artifacts.files import cache_folder, remember, sha256_file
from ssd_artifacts.safetensors_header import read_header
from ssd_profiles.errors import UserError
from ssd_profiles.printable import Printable

COMPUTATION = frozenset(
    (
        *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "attention_out_bias"),
        *("use_bias", "mlp_bias", "hidden_act", "hidden_activation", "rms_norm_eps", "max_position_embeddings"),
        *("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "no_rope_layers"),
        *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "per_layer_config"),
        *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers"),
        *("use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block"),
        *("top_k_experts", "conv_L_cache", "conv_bias", "norm_eps", "block_auto_adjust_ff_dim"),
        *("block_ffn_dim_multiplier", "block_multiple_of", "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"),
        *("projectors_bias", "lm_head_multiplier", "mlp_multipliers", "key_multiplier", "attention_in_multiplier"),
        *("attention_out_multiplier", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier", "mamba_n_heads"),
        *("mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_conv_bias"),
        *("mamba_proj_bias", "time_step_limit", "shared_intermediate_size", "position_embedding_type"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads", "num_experts", "num_local_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
        *("norm_topk_prob", "routed_scaling_factor", "use_expert_bias", "num_dense_layers", "clip_qkv"),
        *("swiglu_alpha", "swiglu_limit", "original_max_position_embeddings", "use_bidirectional_attention"),
        *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier"),
        *("embedding_multiplier", "residual_multiplier", "logits_scaling"),
    )
)
"""Configuration entries that affect what a model computes.

All other entries say how it was saved, loaded or trained, and every release of transformers adds some. A missing entry
is harmless: weights are compared too, and a bundle never changes the output.
"""

PROBE = "The 3 naïve cats — don't they cost $4.50?\n\tfn main() { return x**2; }  日本語 Ωmega"
SLICE_BYTES = 4096
MAX_LAYERS = 1024
"""Upper bound for layers in a bundle, several times what real models have. Masks take memory in proportion."""
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Tokenizer(Protocol):
    """The methods of a tokenizer that its fingerprint needs."""

    def get_vocab(self) -> dict[str, int]:
        """The vocabulary as token → id."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a text as ids."""
        ...


class ModelFingerprint(BaseModel, extra="forbid", frozen=True):
    """A model's identity. Two models are the same if their config, tokenizer and weight hashes are equal."""

    name: Printable
    """Name from which the model can be loaded again: a Hub id, a folder, `demo@wheel`, …"""
    revision: Printable | None
    architecture: Printable
    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    weights_sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    """Hash of all weights; empty where they were not read."""
    weights_sample_sha256: Sha256
    """Hash of three slices per tensor. It is checked at every load, where a full hash would take too long."""
    config_sha256: Sha256
    tokenizer_sha256: Sha256
    dtype: Printable
    quantization: Printable | None

    def spec(self, where: str) -> str:
        """The argument for `load_model`: a Hub id with its revision, a folder, …

        Raises UserError when the model was loaded from a folder that does not exist here.
        """
        if os.path.isabs(self.name) and not os.path.exists(self.name):
            raise UserError(f"{where}: its model was at {self.name}, which is not there; say where it is with --model")
        is_hub = self.revision is not None and "@" not in self.name
        return f"{self.name}@{self.revision}" if is_hub else self.name

    def serves(self, loaded: ModelFingerprint) -> bool:
        """Whether `loaded` is this bundle's model, in whatever dtype or quantisation."""
        return self.num_layers == loaded.num_layers and all(
            getattr(self, f"{part}_sha256") == getattr(loaded, f"{part}_sha256") for part in self._compared(loaded)
        )

    def _compared(self, loaded: ModelFingerprint) -> tuple[str, ...]:
        """Names of the hashes that must agree."""
        requantised = self.quantization != loaded.quantization
        return ("config", "tokenizer") if requantised else ("config", "tokenizer", "weights_sample")

    def require_same_model(self, loaded: ModelFingerprint, where: str) -> None:
        """Raise UserError when `loaded` is a model other than this bundle's.

        Dtypes may differ. So may quantisations: their files have no bytes in common, so config and tokenizer decide,
        and the bundle's acceptance is a prior.
        """
        for part in self._compared(loaded):
            expected = getattr(self, f"{part}_sha256")
            got = getattr(loaded, f"{part}_sha256")
            if expected != got:
                raise UserError(
                    f"{where}: compiled for {self.name} ({self.architecture}), but {loaded.name} has other "
                    f"{part.removesuffix('_sample')} (expected {expected[:12]}…, got {got[:12]}…); "
                    "give that model with --model or compile a bundle for this one"
                )
        if self.num_layers != loaded.num_layers:
            raise UserError(
                f"{where}: compiled for {self.num_layers} layers, but {loaded.name} has {loaded.num_layers}; "
                "compile the bundle again"
            )


def config_sha256(config: Mapping[str, Any]) -> str:
    """SHA-256 of the configuration entries in `COMPUTATION`."""
    kept = {key: value for key, value in config.items() if key in COMPUTATION and value is not None}
    return _sha256(json.dumps(kept, sort_keys=True, default=str))


def tokenizer_sha256(tokenizer: Tokenizer, chat_template: str | None) -> str:
    """SHA-256 of a tokenizer's behaviour: its vocabulary, the ids of a probe text and the chat template."""
    return _sha256(json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.encode(PROBE), chat_template or ""]))


@dataclass(frozen=True, slots=True)
class WeightHashes:
    """Full and sampled hash of a checkpoint."""

    full: str
    sample: str


def weight_hashes(files: Sequence[Path], full: bool = True, cached: bool = True) -> WeightHashes:
    """Hash the tensors of a safetensors checkpoint by name, so that sharding does not matter.

    The full hash reads every byte; it is cached by path, size and times of change. Without `full` it is the cached
    one, or empty; without `cached` files are read in any case. Raises UserError when a file is not safetensors.
    """
    memory = cache_folder() / "weight_hashes" / f"{_sha256(json.dumps(_identity(files)))}.json"
    if cached:
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(memory.read_text())
            return WeightHashes(known["full"], known["sample"])
    tensors = sorted((tensor for file in files for tensor in _tensors(file)), key=lambda tensor: tensor.name)
    sample = hashlib.sha256()
    for tensor in tensors:
        sample.update(tensor.label)
        for start in sorted({0, max(0, tensor.size // 2), max(0, tensor.size - SLICE_BYTES)}):
            sample.update(tensor.read(start, SLICE_BYTES))
    if not full:
        return WeightHashes("", sample.hexdigest())
    complete = hashlib.sha256()
    for tensor in tensors:
        complete.update(tensor.label)
        for start in range(0, tensor.size, 1 << 24):
            complete.update(tensor.read(start, 1 << 24))
    hashes = WeightHashes(complete.hexdigest(), sample.hexdigest())
    remember(memory, json.dumps({"full": hashes.full, "sample": hashes.sample}))
    return hashes


def file_digest(path: Path, cached: bool = True) -> str:
    """SHA-256 of a file. It is cached by path, size and times of change; without `cached` the file is read."""
    memory = cache_folder() / "file_hashes" / f"{_sha256(json.dumps(_identity([path])))}.txt"
    if cached:
        with suppress(OSError, ValueError):
            known = memory.read_text(encoding="ascii")
            if len(known) == 64:
                return known
    found = sha256_file(path)
    remember(memory, found)
    return found


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    label: bytes
    path: Path
    offset: int
    size: int

    def read(self, start: int, count: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset + start)
            return file.read(min(count, self.size - start))


def _tensors(path: Path) -> Iterator[_Tensor]:
    for name, stored in read_header(path).items():
        label = json.dumps([name, stored.dtype, list(stored.shape)]).encode()
        yield _Tensor(name, label, path, stored.offset, stored.nbytes)


def _identity(files: Sequence[Path]) -> list[list[Any]]:
    # Tools such as `cp -p` set the time of modification, but not that of the last change.
    stats = [(file.resolve(), file.stat()) for file in files]
    return sorted([str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in stats)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
