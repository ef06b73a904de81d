"""Times the kernels that could serve a model's projections, in turn, for several numbers of rows.

`python -m bench.studies.weights.kernels --model demo@wheel --rounds 15`
One figure is a pass through all projections of all layers and the head, with random weights of the model's sizes, since
one layer in a loop would stay in the processor's cache. Kernels take turns within each round. Every kernel takes rows
of the dtype that it multiplies, except oneDNN's int8 and ours, whose quantisation of each row is part of their time.
Ours join where they run, and bitsandbytes' 4-bit kernel if that package is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig

from bench.harness.provenance import Watch, disturbance
from ssd_runtime.command import run_guarded
from ssd_runtime.loading.sources import find_model
from ssd_runtime.profiling.clock import seconds
from ssd_runtime.profiling.device import device_identity
from ssd_runtime.weights.kernels.native import Native, quantised_groups
from ssd_runtime.weights.kernels.onednn import can_serve
from ssd_runtime.weights.native.library import library

ROWS = (1, 2, 4, 8, 16, 32)
GROUP = 32
"""Columns that share a scale in a 4-bit weight."""
CPU = torch.device("cpu")
Multiply = Callable[[Tensor], Tensor]
"""A multiplication by one packed weight, from rows [n, in] to [n, out]."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernels", help="Names separated by commas; all by default.")
    arguments = parser.parse_args()
    names = arguments.kernels.split(",") if arguments.kernels else list(KERNELS)
    config = AutoConfig.from_pretrained(find_model(arguments.model).folder)
    watch = Watch()
    with torch.inference_mode():
        taken = in_turn(sizes_of(config), names, arguments.rounds)
    print(f"{device_identity(CPU)}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"All projections and the head of {arguments.model}, ms: median (25th to 75th percentile)")
    print(f"{'rows':18}" + "".join(f"{n:>18}" for n in ROWS))
    for name in names:
        print(f"{name:18}" + "".join(f"{_cell(taken[name, n]):>18}" for n in ROWS))
    print(disturbance(watch.stolen()))


def sizes_of(config: object) -> list[tuple[int, int]]:
    """(out, in) of every projection as the engine runs them: queries, keys and values together, gate and up too."""
    hidden, inner, heads, kv_heads, layers, vocabulary = (
        int(getattr(config, name))
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "num_hidden_layers",
            "vocab_size",
        )
    )
    width = getattr(config, "head_dim", None) or hidden // heads
    layer = [((heads + 2 * kv_heads) * width, hidden), (hidden, heads * width), (2 * inner, hidden), (hidden, inner)]
    return layer * layers + [(vocabulary, hidden)]


def in_turn(sizes: Sequence[tuple[int, int]], names: Sequence[str], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Seconds of a pass through all weights per round, by kernel and number of rows, after one round of warm-up."""
    torch.manual_seed(0)
    weights = [torch.randn(out, width) / width**0.5 for out, width in sizes]
    packed = {name: [KERNELS[name][1](weight) for weight in weights] for name in names}
    taken: dict[tuple[str, int], list[float]] = {(name, n): [] for n in ROWS for name in names}
    for number in range(rounds + 1):
        for (name, n), times in taken.items():
            rows = {width: torch.randn(n, width, dtype=KERNELS[name][0]) for _, width in set(sizes)}
            work = partial(_pass, packed[name], [rows[width] for _, width in sizes])
            elapsed = seconds(work, CPU)
            if number:
                times.append(elapsed)
    return taken


def _pass(multiplies: Sequence[Multiply], rows: Sequence[Tensor]) -> None:
    for multiply, x in zip(multiplies, rows, strict=True):
        multiply(x)


def _cell(times: Sequence[float]) -> str:
    low, middle, high = np.percentile(np.asarray(times) * 1e3, [25, 50, 75])
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"


def module(weight: Tensor, dtype: torch.dtype) -> Multiply:
    """`nn.Linear` itself."""
    own = weight.to(dtype)
    return lambda x: linear(x, own)


def onednn(weight: Tensor, dtype: torch.dtype) -> Multiply:
    """oneDNN's product with a weight in its own layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype))
    return lambda x: torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")


def onednn_int8(weight: Tensor) -> Multiply:
    """oneDNN's integer product: one scale per output and one per row.

    Rows are unsigned around 128, since the product of signed ones has no vector code before AMX.
    """
    scale = weight.abs().amax(1) / 127
    packed = torch.ops.onednn.qlinear_prepack((weight / scale[:, None]).round().to(torch.int8), None)
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    least, middle = torch.tensor(1e-30), torch.tensor(128.5)

    def multiply(x: Tensor) -> Tensor:
        unit = torch.add(least, torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True), alpha=1 / 127)
        rows = torch.addcdiv(middle, x, unit).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        ).mul_(unit)

    return multiply


def aten_int8(weight: Tensor, dtype: torch.dtype) -> Multiply:
    """aten's product of rows with int8 weights, one scale per output."""
    scale = weight.abs().amax(1) / 127
    packed = (weight / scale[:, None]).round().to(torch.int8)
    factors = scale.to(dtype)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, packed, factors)


def aten_int4(weight: Tensor, dtype: torch.dtype) -> Multiply:
    """aten's product of rows with 4-bit weights, a scale and a zero per group."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.amax(-1) - groups.amin(-1)) / 15
    zero = groups.amin(-1) + 8 * scale
    levels = ((groups - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15).to(torch.int32).flatten(1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    scales = torch.stack([scale.T, zero.T], -1).contiguous().to(dtype)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)


def ours8(weight: Tensor) -> Multiply:
    """Our own product of fp32 rows with 8-bit weights, a scale per group; it quantises rows."""
    levels, scale = quantised_groups(weight)
    return Native(levels, scale, None)


def ours4(weight: Tensor) -> Multiply:
    """Our own product of fp32 rows with 4-bit weights, a scale and a zero per group; it quantises rows."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.amax(-1) - groups.amin(-1)) / 15
    zero = groups.amin(-1) + 8 * scale
    levels = ((groups - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15).to(torch.uint8).flatten(1)
    return Native(levels, scale, zero)


def bitsandbytes_4bit(weight: Tensor) -> Multiply:
    """bitsandbytes' product of bf16 rows with NF4 weights of blocks of 64, which its own layout requires."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu, quantize_4bit

    levels, state = quantize_4bit(weight.bfloat16(), blocksize=64, quant_type="nf4")
    packed, state = _convert_weight_packed_for_cpu(levels, state)
    return lambda x: torch.ops.bitsandbytes.gemv_4bit.default(
        x, packed, state.shape, state.absmax, state.code, state.blocksize
    )


KERNELS: dict[str, tuple[torch.dtype, Callable[[Tensor], Multiply]]] = {
    "module fp32": (torch.float32, partial(module, dtype=torch.float32)),
    "module bf16": (torch.bfloat16, partial(module, dtype=torch.bfloat16)),
    "oneDNN fp32": (torch.float32, partial(onednn, dtype=torch.float32)),
    "oneDNN int8": (torch.float32, onednn_int8),
    "aten int8 bf16": (torch.bfloat16, partial(aten_int8, dtype=torch.bfloat16)),
    "aten int4 bf16": (torch.bfloat16, partial(aten_int4, dtype=torch.bfloat16)),
}
"""Name to the dtype of the rows and the function that packs a weight."""
if can_serve(torch.empty(0, dtype=torch.bfloat16)):
    KERNELS["oneDNN bf16"] = (torch.bfloat16, partial(onednn, dtype=torch.bfloat16))
if library() is not None:
    KERNELS |= {"ours 8 bits": (torch.float32, ours8), "ours 4 bits": (torch.float32, ours4)}
if find_spec("bitsandbytes"):
    KERNELS["bitsandbytes 4-bit"] = (torch.bfloat16, bitsandbytes_4bit)


if __name__ == "__main__":
    run_guarded(main)
