"""Trains exit heads on cached features, starting from the closed-form fit (SpecBound §3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ssd_artifacts.exits import ExitSet
from ssd_compiler.calibrate import Sample
from ssd_compiler.exits.fitting import chunked_states
from ssd_compiler.progress import Tick
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import HEAD_ROWS
from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.weights.packed_linear import PackedLinear

LEARNING_RATE = 3e-5
"""AdamW's rate in SpecBound §3.1, which trains for 20 epochs."""
BATCH = 128
TARGETS = "targets"


@dataclass(frozen=True, slots=True)
class CachedFeatures:
    """Training data of exit heads, for which the model runs only once."""

    states: dict[int, Tensor]
    """Maps a layer to its states after the final norm: [tokens, hidden]."""
    targets: Tensor
    """The full model's argmax after each token: [tokens]."""

    def to_bytes(self) -> bytes:
        """Serialise as a safetensors file."""
        named = {str(layer): states.contiguous() for layer, states in self.states.items()}
        return safetensors.torch.save(named | {TARGETS: self.targets})

    @classmethod
    def from_file(cls, path: Path, device: torch.device) -> CachedFeatures:
        """Read what `to_bytes` wrote, onto `device`."""
        named = safetensors.torch.load_file(path, device=str(device))
        targets = named.pop(TARGETS)
        return cls({int(layer): states for layer, states in named.items()}, targets)


def cache_features(decoder: Decoder, samples: Sequence[Sample], layers: Sequence[int], tick: Tick) -> CachedFeatures:
    """Compute states and the model's choices for all tokens of the samples' prompts and continuations."""
    kept: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    targets: list[Tensor] = []
    for sample in samples:
        with torch.inference_mode():
            for states in chunked_states(decoder, sample):
                targets += [argmax(decoder.logits(x)) for x in states[-1].split(HEAD_ROWS)]
                for layer in layers:
                    kept[layer].append(decoder.head.norm(states[2 * layer]))
        tick()
    # Tensors made in inference mode cannot take part in autograd, so they are copied outside of it.
    return CachedFeatures({layer: torch.cat(kept.pop(layer)) for layer in layers}, torch.cat(targets))


def train_exits(decoder: Decoder, fitted: ExitSet, features: CachedFeatures, epochs: int, tick: Tick) -> ExitSet:
    """Train the heads for `epochs` passes, by cross-entropy with the full model's choices.

    The model's own head is frozen: a head here is the affine map in front of it.
    """
    head = decoder.model.lm_head
    head = head.dense() if isinstance(head, PackedLinear) else head
    weights = []
    biases = []
    for place, layer in enumerate(fitted.layers):
        weight = torch.from_numpy(fitted.weights[place].astype(np.float32)).requires_grad_()
        bias = torch.from_numpy(fitted.biases[place].astype(np.float32)).requires_grad_()
        optimiser = torch.optim.AdamW([weight, bias], lr=LEARNING_RATE, weight_decay=0.0)
        order = torch.Generator().manual_seed(layer)
        for _ in range(epochs):
            for rows in torch.randperm(len(features.targets), generator=order).split(BATCH):
                x = features.states[layer][rows].float()
                mapped = torch.addmm(bias.to(x.device), x, weight.to(x.device)).to(decoder.dtype)
                logits = decoder.head.finished(head(mapped)).float()
                optimiser.zero_grad()
                # Only these two tensors get gradients; the user's model must not.
                cross_entropy(logits, features.targets[rows]).backward(inputs=[weight, bias])
                optimiser.step()
            tick()
        weights.append(weight.detach().numpy().astype(np.float16))
        biases.append(bias.detach().numpy().astype(np.float16))
    return ExitSet(fitted.layers, np.stack(weights), np.stack(biases))
