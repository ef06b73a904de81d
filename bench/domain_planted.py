"""A model in which some weak layers matter in one domain only: the ground truth for masks by domain.

`python -m bench.domain_planted --out build/domain-planted --domains gsm8k,humaneval`
After each of some real layers stand two twins, one of either domain. The real layer takes a constant vector off the
state; the twin of the domain that a token is in puts it back, by an MLP that is a linear classifier of the two domains'
normed states with a step behind it. So the model writes as before, skipping the other domain's twin changes nothing,
and skipping one's own leaves the vector missing: a mask for one domain may skip half of the twins' MLPs, one for both
none. The twins' attention is a weak copy's (bench.planted).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from bench.planted import plant_at
from ssd_artifacts.files import new_folder
from ssd_compiler.calibrate import continue_prompts
from ssd_compiler.prompts import load_prompts
from ssd_compiler.settings import CompileSettings
from ssd_profiles.mask import SkipMask
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.session import Session
from ssd_runtime.loading.models import LoadedModel, load_model
from ssd_runtime.model.batch import Batch
from ssd_runtime.model.decoder import Decoder

TRUTH = "planted.json"
STEEPNESS = 30.0
"""Of the step: silu(S (m + 1/2)) - silu(S (m - 1/2)) over S is nearly min(max(m + 1/2, 0), 1) for a margin m."""
SHARPNESS = 2.0
"""What the classifier's margins are multiplied by, so that few lie on the slope of the step."""
PROMPT_TAIL = 160
"""Last prompt tokens of a sample that a gate is fitted on, beside its continuation."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A sample with its state on the way up."""

    domain: int
    session: Session
    x: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=Path("build/domain-planted"))
    parser.add_argument("--domains", default="gsm8k,humaneval")
    parser.add_argument("--epsilon", type=float, default=0.03)
    parser.add_argument("--strength", type=float, default=0.2, help="size of a vector taken off, as part of the state")
    parser.add_argument("--pairs", type=int, default=20, help="real layers with twins behind them")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    domains = tuple(arguments.domains.split(","))
    loaded = load_model(arguments.model, "cpu", "fp32")
    texts = _texts(loaded, domains)
    # Gates need a bias, which Llama's MLP has as an option.
    loaded.model.config.mlp_bias = True
    _add_biases(loaded.model)
    layers = loaded.model.config.num_hidden_layers
    # The first layers do not know yet which domain they are in.
    sources = random.Random(arguments.seed).sample(range(layers // 4, layers), arguments.pairs)
    # The source moves up by the twins of those before it.
    sources = [source + 2 * number for number, source in enumerate(sorted(sources))]
    model, weak = plant_at(loaded.model, arguments.epsilon, [source + by for source in sources for by in (1, 2)])
    told = gate(model, texts, sources, arguments.strength, arguments.seed)
    masks = truth(weak, sources, domains)
    with new_folder(arguments.out) as folder:
        model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        (folder / TRUTH).write_text(json.dumps({name: mask.hex() for name, mask in masks.items()}, indent=1) + "\n")
    print(f"{arguments.out}: {len(model.model.layers)} layers; tokens told apart by the gates: {np.mean(told):.3f}")
    for name, mask in masks.items():
        print(f"{name} may skip {mask}")


def truth(weak: SkipMask, sources: Sequence[int], domains: Sequence[str]) -> dict[str, SkipMask]:
    """What each domain may skip, and what both may (`mix`)."""
    twins = [{2 * (source + by) + 1 for source in sources} for by in (1, 2)]
    everywhere = set(weak) - twins[0] - twins[1]
    masks = {"mix": SkipMask.of(weak.num_layers, everywhere)}
    for name, foreign in zip(domains, reversed(twins), strict=True):
        masks[name] = SkipMask.of(weak.num_layers, everywhere | foreign)
    return masks


@torch.inference_mode()
def gate(
    model: nn.Module, texts: Sequence[tuple[int, list[int]]], sources: Sequence[int], strength: float, seed: int
) -> list[float]:
    """Move a vector from each of `sources` to its twins; returns how well each twin tells tokens apart.

    Layer by layer from below, on the states that the gates before leave.
    """
    decoder, generator = Decoder(model, weight_memory=0), torch.Generator().manual_seed(seed)  # type: ignore[arg-type]
    running = []
    for domain, ids in texts:
        session = Session(decoder)
        session.cache.reserve(len(ids))
        running.append(_Text(domain, session, decoder.embed(ids)))
    told, moved = [], torch.empty(0)
    for place in range(decoder.shape.num_layers):
        attended = []
        for text in running:
            batch = Batch.of([decoder.batches.consecutive(text.session.cache, 0, text.x.shape[0])])
            attended.append(decoder.attention(place, text.x, batch))
        layer = model.model.layers[place]
        if place in sources:
            size = torch.cat([x[-PROMPT_TAIL:] for x in attended]).norm(dim=-1).median()
            direction = torch.randn(attended[0].shape[-1], generator=generator)
            moved = strength * size * direction / direction.norm()
            layer.mlp.down_proj.bias.sub_(moved)
            decoder.refresh()
        for domain in (0, 1):
            if place - 1 - domain in sources:
                told.append(_set_gate(layer, domain, running, attended, moved))
                decoder.refresh()
        running = [
            _Text(text.domain, text.session, decoder.mlp(place, x)) for text, x in zip(running, attended, strict=True)
        ]
    return told


def _set_gate(
    layer: nn.Module, domain: int, running: Sequence[_Text], attended: Sequence[Tensor], moved: Tensor
) -> float:
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    assert isinstance(norm, nn.Module)
    assert isinstance(mlp, nn.Module)
    normed = [norm(x)[-PROMPT_TAIL:] for x in attended]
    features = torch.cat(normed).numpy()
    labels = np.concatenate([np.full(len(x), text.domain == domain) for x, text in zip(normed, running, strict=True)])
    classifier = LogisticRegression(C=0.01, max_iter=500, class_weight="balanced").fit(features, labels)
    for parameter in mlp.parameters():
        parameter.zero_()
    steep = STEEPNESS * SHARPNESS
    for unit, (half, sign) in enumerate(((0.5, 1.0), (-0.5, -1.0))):
        mlp.gate_proj.weight[unit] = torch.from_numpy(classifier.coef_[0]).float() * steep
        mlp.gate_proj.bias[unit] = float(classifier.intercept_[0]) * steep + half * STEEPNESS
        mlp.up_proj.bias[unit] = 1.0
        mlp.down_proj.weight[:, unit] = moved * sign / STEEPNESS
    return float(classifier.score(features, labels))


def _texts(loaded: LoadedModel, domains: Sequence[str]) -> list[tuple[int, list[int]]]:
    """Prompts of the domains with the model's own continuations, by number of domain."""
    settings, decoder, found = CompileSettings("", tuple(domains), seed=1), Decoder(loaded.model), []
    for number, name in enumerate(domains):
        prompts = load_prompts(name, settings, loaded, lambda _: None)
        ids = [*prompts.search, *prompts.asked[:12]]
        continued = continue_prompts(decoder, ids, 64, loaded.eos_ids, lambda: None)
        found += [(number, each["prompt"] + each["continuation"]) for each in continued]
    return found


def _add_biases(model: nn.Module) -> None:
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(layer.mlp, name)
            linear.bias = nn.Parameter(torch.zeros(linear.out_features))


if __name__ == "__main__":
    run_guarded(main)
