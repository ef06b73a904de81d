"""Loads a model with its tokenizer: from a folder or the Hub, or a `.gguf` file whose weights stay packed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from ssd_artifacts.bundle import Bundle
from ssd_profiles.errors import UserError, first_line
from ssd_runtime.devices.memory import require_room, weight_bytes
from ssd_runtime.loading.checkpoints.checkpoint import load_checkpoint, read_checked_config, read_tensors
from ssd_runtime.loading.checkpoints.config import read_config
from ssd_runtime.loading.checkpoints.folder import guarded_loading
from ssd_runtime.loading.checkpoints.mtp import add_mtp
from ssd_runtime.loading.checkpoints.pretrained import read_generation_config, read_tokenizer
from ssd_runtime.loading.checkpoints.sixteen_bits import dtype_to_keep, keep_numbers
from ssd_runtime.loading.gguf.models import packed_model
from ssd_runtime.loading.loaded_model import PACKED, LoadedModel
from ssd_runtime.loading.sources import NAMED, can_be_packed, find_model, find_packed, weight_files
from ssd_runtime.loading.wheels import DEMO
from ssd_runtime.weights.dtype_names import read_dtype
from ssd_runtime.weights.gguf.kernels import held_bytes

WEIGHTS = ("dense", "packed")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(
    spec: str,
    device: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    allow_special: bool = False,
) -> LoadedModel:
    """Load `spec` onto `device`, by default CUDA where there is one.

    `dtype` is fp32, bf16 or fp16 (or transformers' names for these: float32, bfloat16, float16). The default is the
    checkpoint's own, but on a CPU rows are fp32, and so are weights that our own kernels cannot multiply by as they are
    (`dtype_to_keep`). `weights` is packed for a `.gguf`
    file whose weights stay quantised, or dense; by default `weights_of` without a bundle. With `allow_special`, control
    tokens that prompts spell take effect. Raises UserError that says what to give instead.
    """
    dtype = read_dtype(dtype)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if weights is None:
        weights = weights_of(None, spec, device, dtype)
    if weights not in WEIGHTS:
        raise UserError(f"--weights: {weights!r} is unknown; give one of {', '.join(WEIGHTS)}")
    if weights == "packed":
        return _load_packed(spec, device, dtype, allow_special)
    target = _device(device)
    source = find_model(spec)
    config = read_checked_config(spec, source.folder)
    kept = None
    if dtype is None and target.type == "cpu":
        kept = dtype_to_keep(read_tensors(spec, source.folder), config)
    chosen: Any = DTYPES[dtype] if dtype else (kept or torch.float32) if target.type == "cpu" else "auto"
    stored = None if chosen == "auto" else chosen
    require_room(spec, weight_bytes(weight_files(source.folder), stored), target)
    tokenizer = read_tokenizer(spec, source.folder, config)
    with guarded_loading(spec):
        # With a map, every tensor goes to its device as it is read, so that the host never holds all of them.
        placed = {} if target.type == "cpu" else {"device_map": {"": target}}
        model = load_checkpoint(spec, source.folder, config, dtype=chosen, **placed).to(target).eval()
        model = model if kept is None else keep_numbers(model)
        notes = add_mtp(spec, source.folder, model)
    loaded = LoadedModel(model=model, tokenizer=tokenizer, source=source, notes=notes, allow_special=allow_special)
    loaded.require_settings(spec)
    return loaded


def _load_packed(spec: str, device: str | None, dtype: str | None, allow_special: bool) -> LoadedModel:
    if device is not None and _device(device).type != "cpu":
        raise UserError(f"--weights packed: runs on a processor, not on {device}; use --device cpu or --weights dense")
    if dtype not in (None, "fp32"):
        raise UserError(f"--weights packed: rows are fp32, not {dtype}; omit --dtype, or use --weights dense")
    source = find_packed(spec)
    assert source.gguf is not None
    config = read_config(spec, source.folder, most_layers=len(source.gguf.tensors), most_size=source.gguf.dense_bytes)
    tokenizer = read_tokenizer(spec, source.folder, config)
    generation = read_generation_config(spec, source.folder)
    smaller = "give a smaller model, or a file of fewer bits per weight"
    require_room(spec, held_bytes(source.gguf), torch.device("cpu"), smaller)
    model, file = packed_model(source.gguf, config)
    model.generation_config = generation
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        source=source,
        types=file.types,
        notes=_requantised(file.requantised),
        allow_special=allow_special,
    )
    loaded.require_settings(spec)
    return loaded


def _requantised(tensors: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence that names the tensors held with other levels than the file's, with numbers for layers' blocks."""
    if not tensors:
        return ()
    kinds = Counter((re.sub(r"^blk\.\d+\.", "blk.*.", name), kind) for name, kind in tensors.items())
    told = ", ".join(f"{count} {name} ({kind})" for (name, kind), count in sorted(kinds.items()))
    return (f"requantised to 8 bits: {told}",)


def weights_of(bundle: Bundle | None, spec: str, device: str | None = None, dtype: str | None = None) -> str:
    """The `weights` for a model given as `spec`, on a device and in a dtype, which are as for `load_model`.

    A bundle decides it for files. Without one, a `.gguf` file stays packed wherever packed weights can run, but for the
    demo model's, which stands for checkpoints.
    """
    if not can_be_packed(spec):
        return "dense"
    if bundle is not None:
        packed = (bundle.model.quantization or "").split(" ")[0] == PACKED
    else:
        packed = NAMED.get(spec) is not DEMO and read_dtype(dtype) in (None, "fp32") and _device(device).type == "cpu"
    return "packed" if packed else "dense"


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"--device: {name!r} cannot be used ({first_line(error)}); try cpu") from None
    return device
