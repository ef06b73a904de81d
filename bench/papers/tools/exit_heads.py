"""Exit heads fitted in closed form, heads trained as SpecBound trains its own, and no heads, compared.

`python -m bench.papers.tools.exit_heads --artifact build/bundle05 --epochs 3`

It prints the share of tokens on which each exit agrees with the full model, and the speed that tuning predicts. Both
are on samples held back from fitting: two of eight per domain, so that predicted speeds are rough.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from bench.fixtures.prompts.calibration import calibration
from ssd_artifacts.domain_config import MIXTURE
from ssd_artifacts.exits import ExitSet
from ssd_compiler.calibrate import Sample, middle_context, reference_states
from ssd_compiler.exits.fitting import exit_layers, fit_exits, held_back
from ssd_compiler.exits.training import cache_features, train_exits
from ssd_compiler.exits.tuning import exit_traces, tune_exits
from ssd_compiler.settings import CompileSettings
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.search.replay import ReferenceStates

Held = Mapping[str, tuple[float, ReferenceStates]]
"""Maps a domain to the context that its exits are tuned for and the states that evaluate them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path, required=True)
    parser.add_argument("--exits", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    engine = Engine.open(arguments.artifact)
    decoder = engine.decoder
    layers = exit_layers(engine.decoder.shape.num_layers, arguments.exits)
    parts = {name: held_back(samples) for name, samples in _samples(engine).items()}
    fitted_on = [sample for samples, _ in parts.values() for sample in samples]
    judging = [sample for _, kept in parts.values() for sample in kept]
    with torch.inference_mode():
        held = {name: (middle_context(kept), reference_states(decoder, kept)) for name, (_, kept) in parts.items()}
    rows = sum(len(reference) for _, reference in held.values())
    print(f"{'':26}{'seconds':>8}" + "".join(f"{f'layer {layer}':>10}" for layer in layers) + "   predicted")

    def show(name: str, seconds: float, exits: ExitSet | None) -> None:
        found, speeds = _judged(engine, exits, layers, held)
        cells = "".join(f"{share:10.3f}" for share in found)
        said = ", ".join(f"{domain} {speed:.2f}" for domain, speed in speeds.items())
        print(f"{name:26}{seconds:8.0f}{cells}   {said}", flush=True)

    show("the model's head as it is", 0.0, None)
    began = perf_counter()
    exits = fit_exits(decoder, fitted_on, judging, layers, lambda: None)
    show("closed form", perf_counter() - began, exits)
    began = perf_counter()
    features = cache_features(decoder, fitted_on, layers, lambda: None)
    for epochs in sorted({1, arguments.epochs}):
        trained = train_exits(decoder, exits, features, epochs, lambda: None)
        show(f"trained on, epochs: {epochs}", perf_counter() - began, trained)
        began = perf_counter()
    print(f"fitted on {len(features.targets)} tokens, judged by {rows}")


def _samples(engine: Engine) -> dict[str, list[Sample]]:
    """Calibration samples of the bundle's domains."""
    bundle = engine.bundle
    assert bundle is not None
    loaded = engine.loaded
    decoder = engine.decoder
    names = [name for name in bundle.domains if name != MIXTURE]
    settings = CompileSettings(bundle.model.name, tuple(names))
    return {name: calibration(name, settings, loaded, decoder)[1] for name in names}


def _judged(
    engine: Engine, exits: ExitSet | None, layers: tuple[int, ...], held: Held
) -> tuple[np.ndarray, dict[str, float]]:
    """Agreement of each layer's exit on held-back tokens, and the predicted speed by domain."""
    decoder = engine.decoder
    latency = engine.latency
    heads = ExitHeads(decoder, exits)
    matches = []
    speeds = {}
    for name, (context, reference) in held.items():
        traces = exit_traces(heads, reference, layers, decoder.shape.num_layers)
        matches += [trace.matches for trace in traces]
        speeds[name] = tune_exits(traces, layers, latency, context).predicted_speedup
    return np.concatenate(matches).mean(0), speeds


if __name__ == "__main__":
    run_guarded(main)
