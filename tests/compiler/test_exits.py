"""Exit heads: fitted where there is something to learn, tuned to what pays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from bench.fixtures.planted import plant
from ssd_compiler.calibrate import Sample, reference_states
from ssd_compiler.exits.fitting import RIDGES, Regression, chunked_states, exit_layers, fit_exits
from ssd_compiler.exits.tuning import THRESHOLDS, WIDTHS, ExitTrace, _Chain, _Costs, _replay, exit_traces, tune_exits
from ssd_profiles.errors import UserError
from ssd_profiles.formulas import annealed_temperature
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.planning.plan import ConstantPlanner, Plan
from ssd_runtime.sequence.session import Session
from tests.models import tiny_model
from tests.references import generated
from tests.tables import latency_table

# Half of the eight layers do nothing.
MODEL = tiny_model("qwen3", seed=4, max_position_embeddings=256)
DECODER = Decoder(plant(MODEL, 0.0, 4, seed=8)[0])
LAYERS = (2, 4, 6)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    prompts = [[1 + (7 * i + j) % 90 for j in range(6 + i)] for i in range(8)]
    return generated(DECODER, prompts, 40)


def test_layers_are_spread_and_leave_out_the_last() -> None:
    assert exit_layers(30, 4) == (6, 12, 18, 24)
    for layers, count in itertools.product((2, 3, 8, 30), (1, 2, 5, 40)):
        found = exit_layers(layers, count)
        assert found[0] >= 1
        assert found[-1] < layers
        assert len(found) == min(count, layers - 1)
        assert found[-1] >= 0.5 * layers, "spread over the depth, however many were asked for"
    with pytest.raises(UserError, match="one layer"):
        exit_layers(1, 3)


@torch.inference_mode()
def test_a_fit_errs_less_than_the_bare_head_on_tokens_it_was_not_shown(samples: list[Sample]) -> None:
    heads = ExitHeads(DECODER, fit_exits(DECODER, samples[:5], samples[5:6], LAYERS, lambda: None))
    reference = reference_states(DECODER, samples[6:])
    last = DECODER.head.norm(reference.states[-1])
    for layer in LAYERS:
        x = reference.states[2 * layer]
        weight, bias = heads._maps[layer]
        fitted = torch.addmm(bias, DECODER.head.norm(x), weight)
        assert (fitted - last).norm() <= (DECODER.head.norm(x) - last).norm() * 1.02


def test_a_fit_recovers_a_known_map() -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=draws)
    weight, bias = torch.randn(6, 6, generator=draws), torch.randn(6, generator=draws)
    regression = Regression(6)
    for part in x.split(100):
        regression.update(part, part @ weight + bias)
    found, offset = regression.best([(x[:50], x[:50] @ weight + bias)])
    torch.testing.assert_close(found, weight, atol=0.02, rtol=0.02)
    torch.testing.assert_close(offset, bias, atol=0.02, rtol=0.02)


def test_heads_are_fitted_on_the_states_that_decoding_has(samples: list[Sample]) -> None:
    sample = samples[0]
    chunks, reference = list(chunked_states(DECODER, sample)), reference_states(DECODER, [sample])
    for place in (0, 6, 16):
        found = torch.cat([states[place] for states in chunks])
        torch.testing.assert_close(found[len(sample.prompt) :], reference.states[place], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ridge", RIDGES)
def test_no_ridge_pulls_what_all_states_gain_alike(ridge: float) -> None:
    x, regression = torch.randn(400, 6, generator=torch.Generator().manual_seed(0)), Regression(6)
    regression.update(x, x + 5.0)
    weight, bias = regression._solve(ridge)
    torch.testing.assert_close(weight, torch.eye(6), atol=1e-3, rtol=0.0)
    torch.testing.assert_close(bias, torch.full((6,), 5.0), atol=1e-3, rtol=0.0)
    small, large = Regression(6), Regression(6)
    small.update(x, x.roll(1, 1))
    large.update(100 * x, 100 * x.roll(1, 1))
    torch.testing.assert_close(large._solve(ridge)[0], small._solve(ridge)[0], msg="nor does the states' size matter")


@torch.inference_mode()
def test_where_later_layers_do_nothing_the_fit_leaves_states_alone() -> None:
    """Every layer behind the first is weak: an exit there says what the model says."""
    one = tiny_model("qwen3", seed=4, num_hidden_layers=1, max_position_embeddings=256)
    decoder = Decoder(plant(one, 0.0, 3)[0])
    found = generated(decoder, [[1, 2, 3], [9, 8]], 40)
    exits = fit_exits(decoder, found, found, (1, 2), lambda: None)
    assert np.abs(exits.weights - np.eye(32)).max() < 1e-3
    traces = exit_traces(ExitHeads(decoder, exits), reference_states(decoder, found), (1, 2), 4)
    assert all(trace.matches.all() for trace in traces)
    # So every draft stands: whatever the width, a token a draft and one besides.
    drafter = EarlyExit(ExitHeads(decoder, exits), (1,), 0.0)
    got = generate(Session(decoder), [4, 5], ConstantPlanner(Plan("test", drafter, 4)), Limits(41))
    assert [len(cycle.tokens) for cycle in got.cycles] == [5] * 8


@torch.inference_mode()
def test_traces_are_what_drafting_meets(samples: list[Sample]) -> None:
    """Along a right draft, exits say just what the traces of the full model's own tokens say."""
    heads = ExitHeads(DECODER)
    reference = reference_states(DECODER, samples[:1])
    [trace] = exit_traces(heads, reference, LAYERS, 8)
    sample, session = samples[0], Session(DECODER)
    session.prefill(sample.prompt)
    drafted = 0
    session.pending = sample.continuation[0]
    for threshold in (0.02, 0.1, 0.2, 0.4):
        draft = ModelRunner(DECODER).finish(EarlyExit(heads, LAYERS, threshold, 0.2).drafting(session, 12))
        drafted += len(draft.tokens)
        for row, token in enumerate(draft.tokens):
            sure = trace.confidence[0.2][row] >= threshold
            assert sure.any()
            right = bool(trace.matches[row, int(sure.argmax())])
            assert right == (token == sample.continuation[row + 1])
            if not right:
                break
    assert drafted > 3


@torch.inference_mode()
def test_an_exits_confidence_is_annealed_by_its_depth(samples: list[Sample]) -> None:
    """SpecBound eq. 1: the share of its token in the softmax at the layer's temperature."""
    heads, reference = ExitHeads(DECODER), reference_states(DECODER, samples[:1])
    [trace] = exit_traces(heads, reference, LAYERS, 8)
    for column, layer in enumerate(LAYERS):
        logits = heads.logits(layer, reference.states[2 * layer]).float()
        for annealing, confidence in trace.confidence.items():
            expected = (logits / annealed_temperature(layer, 8, annealing)).softmax(-1).amax(-1)
            np.testing.assert_allclose(confidence[:, column], expected, rtol=1e-4)


def chain(matches: list[bool], confidence: float, layers: int = 1) -> ExitTrace:
    right = np.asarray(matches)[:, None].repeat(layers, 1)
    return ExitTrace(right, {a: np.full(right.shape, confidence) for a in (0.0, 0.2, 0.5)})


def test_tuning_drafts_far_where_exits_are_right_and_not_where_they_are_wrong() -> None:
    table = latency_table(8)
    good = tune_exits([chain([True] * 60, 0.99)], (2,), table, 100)
    bad = tune_exits([chain([False] * 60, 0.3)], (2,), table, 100)
    assert good.width == max(WIDTHS)
    assert good.predicted_speedup > 1.3
    assert bad.predicted_speedup < 1.0
    early = tune_exits([chain([True] * 60, 0.99, layers=3)], (2, 4, 6), table, 100)
    assert early.stops == [2], "nothing is gained by going deeper"
    assert good.threshold in THRESHOLDS


def test_a_promise_is_the_time_of_the_layers_heads_and_rows_of_its_cycles() -> None:
    """Each token of a cycle runs alone to the exit, each draft asks the head; one forward computes the other layers."""
    table = latency_table(8)

    def layers(count: int, rows: int = 1) -> float:
        return sum(table.sublayer_seconds(100, rows)[: 2 * count])

    plain, step, look = table.step_seconds(100), table.overhead_seconds(1) + layers(2), table.head_seconds(1)
    wide = 13 * step + 12 * look + table.step_seconds(100, 13) - layers(2, 13)
    good = tune_exits([chain([True] * 65, 0.99)], (2,), table, 100)
    assert good.predicted_speedup == pytest.approx(65 * plain / (5 * wide), abs=1e-4)
    stuck = tune_exits([chain([True] * 60, 0.3)], (2,), table, 100)
    assert stuck.predicted_speedup == pytest.approx(plain / (step + look + plain - layers(2)), abs=1e-4)


def test_a_cycle_yields_its_right_tokens_up_to_the_first_wrong_one() -> None:
    costs, chain = _Costs(latency_table(8), 100), _Chain([0] * 27, [True, True, False] * 9)
    whole, last = (costs.cycle((2,) * width, None) + width * costs.look for width in (4, 3))
    assert _replay(chain, [2], 4, costs) == (27, pytest.approx(8 * whole + last))


def test_a_promise_is_of_text_that_the_choice_was_not_made_on() -> None:
    """Two traces whose exits are right behind one layer each: what is best for the one is wrong for the other."""
    table = latency_table(8)
    right, wrong = np.ones((60, 1), bool), np.zeros((60, 1), bool)
    sure = {annealing: np.full((60, 2), 0.99) for annealing in (0.0, 0.2, 0.5)}
    traces = [ExitTrace(np.hstack(pair), sure) for pair in ((right, wrong), (wrong, right))]
    alone = [tune_exits([trace], (2, 3), table, 100) for trace in traces]
    both = tune_exits(traces, (2, 3), table, 100)
    assert [choice.stops for choice in alone] == [[2], [3]]
    assert both.predicted_speedup < 0.8 < 1.3 < min(choice.predicted_speedup for choice in alone)
