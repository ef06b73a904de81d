"""The cost of a wrong route: every domain's best plan on every domain's calibration text, in predicted speed.

`python -m bench.papers.tools.transfer --artifact demo`

Speeds are ÷ plain decoding. They follow from the bundle's masks, the acceptance on the other domain's text, and this
device's latencies. `auto` takes the better of plain decoding and the routed plan.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from bench.fixtures.prompts.calibration import calibration
from ssd_artifacts.domain_config import MIXTURE
from ssd_compiler.calibrate import middle_context, reference_states
from ssd_compiler.settings import CompileSettings
from ssd_profiles.acceptance import replay
from ssd_profiles.latency import LatencyTable
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.cost import CostModel, Option
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.search.replay import ReferenceStates, replay_mask


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path, default=Path("demo"))
    parser.add_argument("--prompts", type=int, default=8)
    arguments = parser.parse_args()
    engine = Engine.open(arguments.artifact)
    bundle = engine.bundle
    assert bundle is not None
    loaded = engine.loaded
    decoder = engine.decoder
    latency = engine.latency
    names = [name for name in bundle.domains if name != MIXTURE]
    settings = CompileSettings(bundle.model.name, tuple(names), search_prompts=arguments.prompts)
    frontiers = Frontier.of_all(bundle.domains, bundle.model.num_layers)
    print(f"{'prompts of':12}" + "".join(f"{name[:9]:>10}" for name in frontiers) + "   (columns: whose plan)")
    table = []
    for name in names:
        _, samples = calibration(name, settings, loaded, decoder)
        context = middle_context(samples)
        reference = reference_states(decoder, samples)
        row = []
        for frontier in frontiers.values():
            option = CostModel(latency).best_option(frontier.entries, context)
            row.append(float("nan") if option is None else _speed(decoder, reference, option, latency, context))
        table.append(row)
        print(f"{name:12}" + "".join(f"{speed:10.3f}" for speed in row), flush=True)
    speeds = np.asarray(table)[:, : len(names)]
    own = np.diag(speeds)
    others = speeds[~np.eye(len(names), dtype=bool)].reshape(len(names), -1)
    print(f"\na wrong route, always speculating: {np.mean(others / own[:, None]):.3f} of the right one on average")
    safe = np.maximum(own, 1.0)
    safe_others = np.maximum(others, 1.0)
    print(f"a wrong route, plain decoding where that is faster: {np.mean(safe_others / safe[:, None]):.3f}")


def _speed(decoder: Decoder, reference: ReferenceStates, option: Option, latency: LatencyTable, context: int) -> float:
    """Predicted speed of the plan on this text ÷ plain decoding."""
    traces = replay_mask(decoder, reference, option.entry.mask, option.draft_length)
    runs = [replay(trace, option.draft_length, option.threshold) for trace in traces]
    cycles, tokens, steps = (sum(getattr(run, part) for run in runs) for part in ("cycles", "tokens", "steps"))
    costs = CostModel(latency).at(context)
    draft = latency.step_seconds(context, 1, option.entry.mask)
    return float(costs.rate(tokens / cycles, steps / cycles, draft)) * costs.plain


if __name__ == "__main__":
    run_guarded(main)
