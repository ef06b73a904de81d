"""Sizes of calls of our own kernels: those that agree give the right numbers, and those that do not are refused.

`test_native_sanitized.py` runs these tests with a library that finds every byte out of bounds.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from ssd_runtime.model.batch.batch import Lineage
from ssd_runtime.model.cache.mixer_states import Kept
from ssd_runtime.model.mixers.mixer import Finish, State
from ssd_runtime.model.sublayers.native_attention import HEAD_DIMS, NativeAttention
from ssd_runtime.model.sublayers.native_mixing import NativeMixing, TreeStates
from ssd_runtime.model.sublayers.native_run import NativeRun, NativeSubLayer
from ssd_runtime.weights.kernels.formats import TILE
from ssd_runtime.weights.kernels.kernel import Connection, RmsNorm, capped
from ssd_runtime.weights.kernels.native_ending import Injected, NativeEnding
from ssd_runtime.weights.kernels.native_mlp import (
    Activation,
    Function,
    NativeExperts,
    NativeMlp,
    Router,
    Routing,
    Shared,
)
from ssd_runtime.weights.kernels.native_recurrence import NativeRecurrence
from ssd_runtime.weights.native.library import Library
from tests.native_blocks import (
    EPSILON,
    Block,
    activated,
    any_activation,
    any_connection,
    any_norm,
    any_weight,
    connected,
    normed,
    silu_mlp,
)
from tests.native_mixers import Mixed, Scan, kept_by
from tests.native_weights import native8, weight4, weight8, weight16
from tests.spoiler import Spoiler

pytestmark = pytest.mark.usefixtures("threads")
DRAWS = int(os.environ.get("SSD_SHAPES", "8"))
SPOILT = 2


class Projections:
    """Random weights, and calls of `linear` and `mlp` with them."""

    def __init__(self, own: bool) -> None:
        self.hidden, self.inner, self.n = 32 * random.randint(1, 6), 32 * random.randint(1, 20), random.randint(0, 40)
        self.up, self.dense_up = any_weight(2 * self.inner, self.hidden, own)
        self.down, self.dense_down = any_weight(self.hidden, self.inner, own)
        self.norm, self.after = any_norm(self.hidden), RmsNorm(torch.rand(self.hidden), EPSILON)
        self.connection, self.activation = any_connection(self.hidden), any_activation()
        self.cap, self.factor = random.choice([None, 1.5]), random.choice([None, torch.tensor([0.3])])
        self.gate, self.dense_gate = any_weight(self.inner, self.hidden, own)
        self.inputs = torch.randn(self.n, self.inner)
        self.x, self.residual = (
            torch.randn(self.n, self.hidden),
            random.choice([None, torch.randn(self.n, 2 * self.inner)]),
        )

    def calls(self) -> Tensor:
        mlp = NativeMlp(self.up, self.down, self.activation)
        linear = self.up.fused(self.x, self.norm, self.residual, self.cap)
        return torch.cat([linear, mlp(self.x, self.connection), self.ending()(self.x, self.inputs)], 1)

    def ending(self) -> NativeEnding:
        injected = Injected(self.gate, self.down, self.activation, self.after)
        return NativeEnding(self.hidden, self.factor, injected)

    def expected(self) -> Tensor:
        product = normed(self.x, self.norm) @ self.dense_up.T
        product = capped(product if self.residual is None else product + self.residual, self.cap)
        joined = activated(self.activation, self.x @ self.dense_gate.T, self.inputs) @ self.dense_down.T
        ended = (1.0 if self.factor is None else self.factor) * (self.x + normed(joined, self.after))
        return torch.cat([product, connected(self.x, self.connection, self.mlp), ended], 1)

    def mlp(self, x: Tensor) -> Tensor:
        return activated(self.activation, *(x @ self.dense_up.T).chunk(2, -1)) @ self.dense_down.T


def test_sums_over_spans_of_columns_are_capped_once(instructions: Library) -> None:
    """Weights of 16 bits meet many rows in spans of 2,048 columns."""
    kernel, dense = weight16(32, 6144)
    x = torch.randn(20, 6144)
    assert near(kernel.fused(x, None, None, cap=1.5), capped(x @ dense.T, 1.5))


class Mixture:
    """Random experts on random rows, which a router sends to some of them, or the caller."""

    def __init__(self, own: bool, routing: Routing | None = None) -> None:
        self.hidden, self.inner, self.n = 32 * random.randint(1, 6), 32 * random.randint(1, 6), random.randint(1, 40)
        self.number = random.randint(1, 9)
        self.each = random.randint(1, self.number)
        self.routing = random.choice(list(Routing)) if routing is None else routing
        kinds = [random.choice([weight4, weight8, partial(weight16, dtype=torch.float16)]) for _ in range(2)]
        self.activation, self.connection = any_activation(), any_connection(self.hidden)
        self.experts = list[NativeMlp]()
        self.dense = list[tuple[Tensor, Tensor]]()
        for _ in range(self.number):
            (up, dense_up), (down, dense_down) = (
                kinds[0](2 * self.inner, self.hidden),
                kinds[1](self.hidden, self.inner),
            )
            up.own_threads = down.own_threads = own
            self.experts.append(NativeMlp(up, down, self.activation))
            self.dense.append((dense_up, dense_down))
        self.first = self.experts[0].gate_up
        self.router = torch.randn(self.number, self.hidden)
        self.bias, self.factors = (random.choice([None, torch.randn(self.number)]) for _ in range(2))
        self.router_norm = any_norm(self.hidden)
        wide = 32 * random.randint(1, 6)
        (up, dense_up), (down, dense_down) = any_weight(2 * wide, self.hidden, own), any_weight(self.hidden, wide, own)
        self.dense_shared = dense_up, dense_down
        gate, norms = random.choice([None, torch.randn(self.hidden)]), [any_norm(self.hidden) for _ in range(3)]
        self.shared = random.choice([None, Shared(NativeMlp(up, down, self.activation), gate, *norms)])
        self.x = torch.randn(self.n, self.hidden)
        self.weights = torch.rand(self.n, self.each)
        self.chosen = torch.randint(self.number, (self.n, self.each))

    def native(self) -> NativeExperts:
        if self.routing is Routing.GIVEN:
            return NativeExperts(self.experts, None, self.shared)
        router = Router(self.router, self.bias, self.each, self.routing, self.factors, self.router_norm)
        return NativeExperts(self.experts, router, self.shared)

    def call(self) -> Tensor:
        choice = (self.weights, self.chosen) if self.routing is Routing.GIVEN else None
        return self.native()(self.x, self.connection, choice)

    def expected(self) -> Tensor:
        return connected(self.x, self.connection, self.output)

    def output(self, rows: Tensor) -> Tensor:
        if self.shared is None:
            return self.routed(rows, rows if self.router_norm is None else normed(self.x, self.router_norm))
        own = rows if self.shared.norm is None else normed(self.x, self.shared.norm)
        seen = own if self.router_norm is None else normed(self.x, self.router_norm)
        up, down = self.dense_shared
        of_all = normed(activated(self.activation, *(rows @ up.T).chunk(2, -1)) @ down.T, self.shared.shared_after)
        factor = 1.0 if self.shared.gate is None else (rows @ self.shared.gate).sigmoid()[:, None]
        return normed(self.routed(own, seen), self.shared.after) + factor * of_all

    def routed(self, rows: Tensor, x: Tensor) -> Tensor:
        """The weighted sum of experts' outputs for `rows`, which the router sees as `x`."""
        weights, chosen = self.weights, self.chosen
        if self.routing is Routing.SIGMOIDS:
            sigmoids = linear(x, self.router).sigmoid()
            chosen = (sigmoids if self.bias is None else sigmoids + self.bias).topk(self.each).indices
            weights = sigmoids.gather(1, chosen)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
        elif self.routing is not Routing.GIVEN:
            weights, chosen = linear(x, self.router, self.bias).softmax(-1).topk(self.each)
            weights = weights / weights.sum(-1, keepdim=True) if self.routing is Routing.SHARES else weights
        if self.routing is not Routing.GIVEN and self.factors is not None:
            weights = weights * self.factors[chosen]
        total = torch.zeros_like(rows)
        for row in range(self.n):
            for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
                up, down = self.dense[expert]
                total[row] += weight * (down @ activated(self.activation, *(up @ rows[row]).chunk(2)))
        return total


def test_chosen_tiles_have_the_whole_weights_outputs_and_others_none(instructions: Library) -> None:
    for seed in range(DRAWS):
        projections = Projections(own=seeded(seed, 1 + seed % 3))
        every = projections.up.out_features // TILE
        tiles = torch.randperm(every)[: random.randint(1, every)]
        whole = projections.up.fused(projections.x, projections.norm, None)
        some = projections.up.among(tiles)
        found = some.fused(projections.x, projections.norm, None)
        chosen = torch.zeros(every, dtype=torch.bool).index_fill(0, tiles, True).repeat_interleave(TILE)
        assert torch.equal(found[:, chosen], whole[:, chosen])
        assert (found[:, ~chosen] == -torch.inf).all()
        with pytest.raises(RuntimeError, match="chosen tiles"):
            projections.up.among(torch.tensor([random.choice([-1, every])])).fused(projections.x, None, None)
        with pytest.raises(RuntimeError, match="chosen tiles"):
            silu_mlp(some, projections.down)(projections.x, None)


def _fewer_slots(segment: Any, block: Block) -> None:
    keys, values, size, room, stride = segment.cache.address(0, 0)
    segment.cache = SimpleNamespace(address=lambda *at: (keys, values, size, room - 1, stride))


def _other_heads(segment: Any, block: Block) -> None:
    cache = block.stored(torch.zeros(2, block.kv_heads - 1, segment.views[0].end, block.head_dim))
    keys = cache[0]
    segment.cache = SimpleNamespace(
        address=lambda *at: (keys.data_ptr(), cache[1].data_ptr(), keys.nbytes, keys.shape[1], keys[0].nbytes)
    )


SEQUENCES: dict[str, Any] = {
    "a rotation has n rows": "rotation",
    "each sequence has a row": lambda segment, block: setattr(segment, "rows", segment.rows + 1),
    "rows see slots of the pool": _fewer_slots,
    "rows write their keys": lambda segment, block: setattr(segment, "slot", segment.slot + 1),
    "the pool holds": _other_heads,
    "a bias has a row": lambda segment, block: setattr(
        segment.views[0], "bias", torch.zeros(segment.rows, segment.views[0].end + 1)
    ),
}
"""What breaks a rule about a sequence."""


def seeded(seed: int, threads: int) -> bool:
    """Begin a draw; returns whether it runs on threads of our own."""
    torch.manual_seed(seed)
    random.seed(seed)
    torch.set_num_threads(threads)
    return seed % 2 == 0


def near(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and bool((got - expected).norm() <= 0.1 * expected.norm())


def test_calls_whose_sizes_agree_compute_what_torch_does(instructions: Library) -> None:
    for seed in range(DRAWS):
        own = seeded(seed, 1 + seed % 3)
        projections, block = Projections(own), Block(own, HEAD_DIMS)
        rows = torch.randn(sum(block.rows), block.hidden)
        assert near(projections.calls(), projections.expected()), seed
        assert near(block(rows), block.expected(rows)), seed
        mixture, mixed, scan = Mixture(own), Mixed(own), Scan()
        assert near(mixture.call(), mixture.expected()), seed
        assert near(mixed(x := torch.randn(sum(mixed.rows), mixed.hidden)), mixed.expected(x)), seed
        torch.testing.assert_close(scan.call(), scan.expected(), rtol=1e-4, atol=1e-4)


def test_a_row_of_a_recurrence_has_the_same_result_however_many_rows_follow(instructions: Library) -> None:
    for seed in range(DRAWS):
        seeded(seed, 1 + seed % 3)
        scan = Scan()
        whole, after = scan.native(scan.before, scan.inputs)
        kept, before = list[Tensor](), scan.before
        for row in scan.inputs.split(1):
            out, before = scan.native(before, row)
            kept.append(out)
        assert all(map(torch.equal, (torch.cat(kept), *before), (whole, *after))), seed


def test_a_row_of_a_mixer_has_the_same_result_whatever_rows_stand_beside_it(instructions: Library) -> None:
    """In a chain alone, among other sequences, and in a tree whose every row follows the one before."""
    for seed in range(DRAWS):
        mixed = Mixed(own=seeded(seed, 1 + seed % 3))
        x = torch.randn(sum(mixed.rows), mixed.hidden)
        mixed.lineages = [None for _ in mixed.rows]
        whole, rows = mixed.mixing(0, x, mixed.segments(), x), list[Tensor]()
        for segment, part in zip(mixed.segments(), x.split(mixed.rows), strict=True):
            for row, own in enumerate(part.split(1)):
                rows.append(mixed.mixing(0, own, [replace(segment, slot=5 + row, rows=1)], own))
        assert torch.equal(torch.cat(rows), whole), seed
        mixed.lineages = [Lineage(tuple(range(-1, n - 1)), (5,) * n, kept=True) for n in mixed.rows]
        assert torch.equal(mixed.mixing(0, x, mixed.segments(), x), whole), seed


def test_siblings_that_nothing_follows_share_the_memory_of_a_state(instructions: Library) -> None:
    for seed in range(DRAWS):
        mixed = Mixed(own=seeded(seed, 1))
        mixed.lineages = [Lineage((-1,) * n, (5,) * n, kept=True) for n in mixed.rows]
        places = mixed.mixing.continued(0, mixed.segments(), TreeStates()).places
        assert len(places) == sum(mixed.rows)
        assert len({place.next for place in places}) == 1, seed


def test_a_row_of_a_mixture_has_the_same_result_whatever_rows_stand_beside_it(instructions: Library) -> None:
    for seed in range(DRAWS):
        mixture = Mixture(
            seeded(seed, 1 + seed % 3), random.choice([Routing.SOFTMAX, Routing.SHARES, Routing.SIGMOIDS])
        )
        native = mixture.native()
        whole = native(mixture.x, mixture.connection)
        for size in (1, 3, 17):
            assert torch.equal(
                torch.cat([native(rows, mixture.connection) for rows in mixture.x.split(size)]), whole
            ), seed


def test_a_row_with_a_number_that_is_not_finite_has_no_finite_result_and_changes_no_other(
    instructions: Library,
) -> None:
    """Nor does a whole row of them overflow a sum."""
    for seed in range(DRAWS):
        seeded(seed, 2)
        projections = Projections(own=True)
        projections.n = max(projections.n, 2)
        projections.residual = None
        projections.x = torch.randn(projections.n, projections.hidden)
        projections.inputs = torch.randn(projections.n, projections.inner)
        expected = projections.calls()
        projections.x[0, random.choice([slice(None), slice(3, 4)])] = random.choice([torch.nan, torch.inf, -torch.inf])
        found = projections.calls()
        assert torch.equal(found[1:], expected[1:])
        assert not found[0, : 2 * projections.inner].isfinite().any()
        mixture = Mixture(True, Routing.SOFTMAX)
        mixture.x = torch.randn(max(mixture.n, 2), mixture.hidden)
        expected = mixture.call()
        mixture.x[0, 3] = random.choice([torch.nan, torch.inf])
        found = mixture.call()
        assert torch.equal(found[1:], expected[1:])
        assert not found[0].isfinite().any()


@pytest.mark.parametrize(
    ("row", "value", "cap"),
    [(3, torch.inf, 0.0), *itertools.product((3, 16 + 3, 4 * 16 + 3), (torch.nan,), (0.0, 1.5))],
)
def test_a_query_key_or_gate_that_is_not_finite_has_no_finite_result(
    instructions: Library, row: int, value: float, cap: float
) -> None:
    heads, size, hidden = 2, 16, 64
    levels = torch.randint(-127, 128, (4 * heads * size, hidden), dtype=torch.int8)
    scales = torch.rand(len(levels), hidden // 32) / 99
    scales[row] = value  # of a head's 16 queries, of its gates, or of the first keys
    attention = NativeAttention(
        qkv=[native8(levels, scales)],
        output=weight8(hidden, heads * size)[0],
        connection=None,
        q_norm=None,
        k_norm=None,
        heads=heads,
        kv_heads=heads,
        head_dim=size,
        scale=size**-0.5,
        cap=cap,
        gated=True,
    )
    cache = torch.zeros(2, heads, 4, size)
    address = cache[0].data_ptr(), cache[1].data_ptr(), cache[0].nbytes, 4, cache[0, 0].nbytes
    view = SimpleNamespace(begin=0, end=3, bias=None)
    owner = SimpleNamespace(address=lambda layer, begin: address)
    segment: Any = SimpleNamespace(views=[view], rows=3, slot=0, cache=owner)
    assert not attention(0, 0, torch.randn(3, hidden), [segment], None).isfinite().any()


def test_a_time_step_that_is_not_finite_has_results_as_finite_as_torchs(instructions: Library) -> None:
    for seed in range(DRAWS):
        seeded(seed, 1)
        scan = Scan()
        scan.inputs[0, -scan.heads :] = torch.nan
        assert torch.equal(scan.call().isfinite(), scan.expected().isfinite()), seed


def test_rows_of_the_smallest_numbers_are_zeros(instructions: Library) -> None:
    """The inverse of their scale would be infinite."""
    kernel, _ = any_weight(32, 64, own=False)
    assert kernel.fused(torch.full((2, 64), 1e-42), None, None).abs().max() < 1e-30


def test_a_wrong_number_is_refused_or_changes_nothing(instructions: Library) -> None:
    spoilers = list[Spoiler]()
    for seed in range(SPOILT):
        own = seeded(seed, 2)
        projections, block = Projections(own), Block(own, (16, 80))
        rows = torch.randn(sum(block.rows), block.hidden)
        mixture, mixed, scan = Mixture(own), Mixed(own), Scan()
        spoilers += [Spoiler(instructions) for _ in range(6)]
        projections.up.library, block.attention._library, mixture.first.library = spoilers[-3:]  # type: ignore[assignment]
        scan.native._library, mixed.mixing._library = spoilers[-5:-3]  # type: ignore[assignment]
        projections.gate.library = spoilers[-6]  # type: ignore[assignment]
        assert near(projections.calls(), projections.expected()), seed
        assert near(block(rows), block.expected(rows)), seed
        assert near(mixture.call(), mixture.expected()), seed
        assert near(scan.call(), scan.expected()), seed
        assert near(mixed(x := torch.randn(sum(mixed.rows), mixed.hidden)), mixed.expected(x)), seed
    codes = [code for spoiler in spoilers for code in spoiler.codes]
    assert len(set(codes)) > 20
    assert sum(code > 0 for code in codes) > 0.8 * len(codes)


def attention_with(block: Block, **changes: Any) -> Callable[[], object]:
    """A call of a block of which some parts are others."""
    x = torch.randn(sum(block.rows), block.hidden)
    return lambda: NativeAttention(**{**block.parts, **changes})(0, 0, x, block.segments(block.caches), block.rotation)


def misfits(own: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of objects that do not fit each other, and words of the rules that they break."""
    projections, block = Projections(own), Block(own, HEAD_DIMS)
    hidden, inner, mixed = projections.hidden, projections.inner, block.heads * block.head_dim
    other, _ = any_weight(hidden, inner + 32, own)
    wide, _ = any_weight(hidden + 32, inner, own)
    x, up = torch.randn(3, hidden), projections.up
    yield "x is n rows", lambda: up(torch.randn(3, hidden + 32))
    yield "x is n rows", lambda: up.fused(x.half(), None, None)
    yield "a residual is n rows", lambda: up.fused(x, None, torch.randn(2, 2 * inner))
    yield "a residual is n rows", lambda: up.fused(x, None, torch.randn(3, 2 * inner).half())
    yield "a norm has a number", lambda: up.fused(x, RmsNorm(torch.rand(hidden - 1), EPSILON), None)
    yield "down has half", lambda: silu_mlp(up, other)(x, None)
    yield "a block's last weight", lambda: silu_mlp(up, wide)(x, None)
    for name in ("q_norm", "k_norm", "v_norm"):
        yield "norms of queries and keys", attention_with(block, **{name: RmsNorm(torch.rand(8), EPSILON)})
    short = RmsNorm(torch.rand(8), EPSILON)
    for connection in (Connection(short), Connection(None, short)):
        yield "a norm has a number", attention_with(block, connection=connection)
        yield "a norm has a number", lambda connection=connection: silu_mlp(up, projections.down)(x, connection)
    unknown = Activation(len(Function))
    yield "gate and up are joined", lambda: NativeMlp(up, projections.down, unknown)(x, None)
    one, two = (any_weight(16, block.hidden + more, own, block.quantised)[0] for more in (0, 32))
    other_rows, _ = any_weight(16, block.hidden, own, not block.quantised)
    yield "the outputs of these weights", attention_with(block, qkv=[one])
    yield "the outputs of these weights", attention_with(block, qkv=[one, *block.parts["qkv"]][:3])
    yield "a few weights of the same columns", attention_with(block, qkv=[one] * 4)
    for unlike in (two, other_rows):
        yield "a few weights of the same columns", attention_with(block, qkv=[one, unlike])
    yield "heads are a multiple", attention_with(block, heads=block.heads + 1)
    yield "the last weight has a column", attention_with(block, output=any_weight(block.hidden, mixed + 32, own)[0])
    yield "a head's size", attention_with(block, head_dim=8)
    together = RmsNorm(torch.rand(block.kv_heads * block.head_dim), EPSILON)
    for changes in ({"made": 3}, {"made": -1}, {"made": 1, "gated": False, "norms_last": False, "k_norm": together}):
        yield "a key-value head has", attention_with(block, **changes)
    yield "the ending of a layer", lambda: projections.ending()(projections.x, projections.inputs[:, 1:])
    yield "the ending of a layer", lambda: projections.ending()(projections.x, None)
    yield "x is n rows", lambda: projections.ending()(projections.x[:, 1:], projections.inputs)
    yield "sinks have a score", attention_with(block, sinks=torch.zeros(block.heads + 1))
    yield from mixture_misfits(own)
    yield from mixer_misfits(own)
    yield from scan_misfits()


def mixture_misfits(own: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of experts, routers and choices that do not fit each other."""
    mixture = Mixture(own, Routing.GIVEN)
    x, each = torch.randn(2, mixture.hidden), mixture.each
    up, down, _ = mixture.experts[0]
    choice = torch.rand(2, each), torch.zeros(2, each, dtype=torch.int32)

    def with_router(
        weight: Tensor, bias: Tensor | None = None, each: int = each, routing: Routing = Routing.SHARES
    ) -> NativeExperts:
        return NativeExperts(mixture.experts, Router(weight, bias, each, routing))

    for unlike in (
        silu_mlp(any_weight(2 * mixture.inner + 64, mixture.hidden, own)[0], down),
        silu_mlp(up, any_weight(mixture.hidden, mixture.inner + 32, own)[0]),
        silu_mlp((weight4 if up.has_numbers else weight16)(2 * mixture.inner, mixture.hidden)[0], down),
    ):
        experts = NativeExperts([*mixture.experts, unlike])
        yield "experts have the same", lambda experts=experts: experts(x, None, choice)
    yield "experts have the same", lambda: with_router(mixture.router, each=99)(x, None)
    short = mixture.router[:, 1:].contiguous()
    yield "a router has a row", lambda: with_router(short)(x, None)
    yield "a router has a row", lambda: with_router(mixture.router, torch.ones(mixture.number + 1))(x, None)
    yield "a router has a row", lambda: with_router(mixture.router, routing=Routing.GIVEN)(x, None)
    yield "n rows come with", lambda: NativeExperts(mixture.experts)(x, None)
    for wrong in (-1, mixture.number):
        wrongly = choice[0], torch.full((2, each), wrong)
        yield "n rows come with", lambda wrongly=wrongly: NativeExperts(mixture.experts)(x, None, wrongly)
    factors = torch.ones(mixture.number + 1)
    factored = NativeExperts(mixture.experts, Router(mixture.router, None, each, Routing.SHARES, factors))
    yield "a router has a row", lambda: factored(x, None)
    for shared in (
        Shared(silu_mlp(any_weight(64, mixture.hidden + 32, own)[0], any_weight(mixture.hidden, 32, own)[0]), None),
        Shared(silu_mlp(any_weight(64, mixture.hidden, own)[0], any_weight(mixture.hidden, 64, own)[0]), None),
        Shared(mixture.experts[0], torch.ones(mixture.hidden + 1)),
    ):
        yield (
            "an expert of all rows",
            lambda shared=shared: NativeExperts(mixture.experts, None, shared)(x, None, choice),
        )
    norm = RmsNorm(torch.ones(8), EPSILON)
    for norms in ((norm, None, None), (None, norm, None), (None, None, norm)):
        beside = NativeExperts(mixture.experts, None, Shared(mixture.experts[0], None, *norms))
        yield "a norm has a number", lambda beside=beside: beside(x, None, choice)
    routed = with_router(mixture.router)
    yield "n rows come with", lambda: routed(x, None, choice)
    yield "x is n rows", lambda: routed(torch.randn(2, mixture.hidden + 32), None)


def mixer_misfits(own: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of a mixer with parts that do not fit each other."""
    mixed = Mixed(own)
    x, inner, segments = torch.randn(sum(mixed.rows), mixed.hidden), mixed.inner, mixed.segments()

    def calling(**changes: Any) -> Callable[[], object]:
        return lambda: NativeMixing(**{**mixed.parts, **changes})(0, x, mixed.segments(), x)

    def finish(**changes: Any) -> Finish:
        return mixed.parts["finish"]._replace(**changes)

    first, *rest = mixed.parts["inputs"]
    quantised = not first.has_numbers
    wide = any_weight(first.out_features, mixed.hidden + 32, own, quantised)[0]
    yield (
        "the outputs of these weights",
        calling(inputs=[any_weight(16, mixed.hidden, own, quantised)[0], first, *rest]),
    )
    yield "a few weights of the same columns", calling(inputs=[any_weight(16, mixed.hidden, own, quantised)[0], wide])
    yield "the last weight has a column", calling(output=any_weight(mixed.hidden, inner + 32, own)[0])
    yield "a block's last weight", calling(output=any_weight(mixed.hidden + 16, inner, own)[0])
    yield "a norm has a number", calling(finish=finish(norm=RmsNorm(torch.ones(inner + 1), EPSILON)))
    for order in (torch.arange(inner + 1), torch.full((inner,), inner), torch.full((inner,), -1)):
        yield "an order of mixed values", calling(finish=finish(order=order.int()))
    yield "each sequence has a row", lambda: mixed.mixing(0, x[1:], segments, x[1:])
    window, *matrix = mixed.scan.before
    segments[-1].cache.states.of(0).base = Kept(5, (window.repeat(2, 1), *matrix))
    yield "a state is the window", lambda: mixed.mixing(0, x, segments, x)


def scan_misfits() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of recurrences with parts that do not fit each other."""
    scan = Scan()
    window, *matrix = scan.before

    def calling(
        native: NativeRecurrence, before: State = scan.before, inputs: Tensor = scan.inputs
    ) -> Callable[[], object]:
        return lambda: native(before, inputs)

    yield "a convolution has two rows", calling(scan.made(taps=scan.taps[:1]))
    yield "a convolution has two rows", calling(scan.made(bias=torch.zeros(scan.channels + 1)))
    yield "a state is the window", calling(scan.native, (window.repeat(2, 1), *matrix))
    yield "x is n rows", calling(scan.native, inputs=scan.inputs[:, 1:])
    if scan.numbers is None:
        return
    yield "a recurrence has heads", calling(scan.made(groups=scan.groups + scan.heads))
    yield "a recurrence has heads", calling(scan.made(state=torch.zeros(scan.heads, scan.key, scan.value + 8)))
    yield "a convolution has two rows", calling(scan.made(taps=scan.taps[:, 1:]))
    for name, numbers in scan.numbers._asdict().items():
        if numbers is not None:
            changed = scan.numbers._replace(**{name: torch.zeros(scan.heads + 1)})
            yield "every head has", calling(scan.made(numbers=changed))
    yield "a state is the window", calling(scan.native, (window, torch.zeros(scan.heads + 1, scan.key, scan.value)))


def test_objects_that_misfit_are_refused_by_the_rule(instructions: Library) -> None:
    for seed in range(DRAWS // 4):
        for rule, call in misfits(seeded(seed, 2)):
            with pytest.raises(RuntimeError, match=f"do not agree: {rule}"):
                call()


def test_sequences_that_misfit_are_refused_by_the_rule(instructions: Library) -> None:
    for seed in range(DRAWS):
        block = Block(seeded(seed, 2), HEAD_DIMS)
        x = torch.randn(sum(block.rows), block.hidden)
        for rule, change in SEQUENCES.items():
            segments, rotation = block.segments(block.caches), block.angles.cos().contiguous()
            if change == "rotation":
                rotation = rotation[1:]
            else:
                change(segments[-1], block)
            with pytest.raises(RuntimeError, match=f"do not agree: {rule}"):
                block.attention(0, 0, x, segments, (rotation, rotation))


def random_run(own: bool) -> tuple[Block, list[NativeSubLayer], tuple[Tensor, Any, Tensor]]:
    """Sub-layers of one width in random order, and rows for them, with their sequences and inputs."""
    block = Block(own, (16, 80))
    inner = 32 * random.randint(1, 9)
    weights = any_weight(2 * inner, block.hidden, own)[0], any_weight(block.hidden, inner, own)[0]
    mlp = NativeMlp(*weights, any_activation())
    kinds = [weight4(2 * inner, block.hidden), weight8(block.hidden, inner)]
    for kernel, _ in kinds:
        kernel.own_threads = own
    expert = NativeMlp(kinds[0][0], kinds[1][0], any_activation())
    experts = NativeExperts([expert] * 3, Router(torch.randn(3, block.hidden), None, 2, Routing.SHARES))
    mixed = Mixed(own, block.hidden, block.rows)
    parts = [NativeSubLayer(0, 0, block.attention), NativeSubLayer(0, 0, mixed.mixing)]
    # Without norms before them, products of gate and up overflow after a few.
    parts += [NativeSubLayer(0, 0, each, any_connection(block.hidden, is_normed=True)) for each in (mlp, experts)]
    gate, after = any_weight(inner, block.hidden, own)[0], RmsNorm(torch.rand(block.hidden), EPSILON)
    for injected in (None, Injected(gate, mlp.down, Activation(Function.CLAMPED, 1.7, 5.0), after)):
        parts.append(NativeSubLayer(0, 0, NativeEnding(block.hidden, torch.tensor([0.7]), injected)))
    batch = SimpleNamespace(sequences=block.segments(block.caches), rotations=[block.rotation])
    for segment in batch.sequences:
        segment.cache.states, segment.lineage, segment.certain = mixed.states(segment.slot), None, False
    n = sum(block.rows)
    rows = torch.randn(n, block.hidden), batch, torch.randn(1, n, inner)
    return block, random.choices(parts, k=random.randint(1, 5)), rows


def test_a_run_is_its_sublayers_one_after_the_other(instructions: Library) -> None:
    for seed in range(DRAWS):
        block, parts, rows = random_run(seeded(seed, 2))
        x, batch, inputs = rows
        before = [cache.clone() for cache in block.caches]
        expected = x
        for part in parts:
            if part.attention is not None:
                expected = part.attention(0, 0, expected, batch.sequences, block.rotation)
            elif part.mixing is not None:
                expected = part.mixing(0, expected, batch.sequences, expected)
            elif part.ending is not None:
                expected = part.ending(expected, inputs[0] if part.ending.width else None)
            elif part.rowwise is not None:
                expected = part.rowwise(expected, part.connection)
        kept = [cache.clone() for cache in block.caches]
        is_mixed = any(part.mixing is not None for part in parts)
        states = kept_by(batch.sequences) if is_mixed else None
        for cache, old in zip(block.caches, before, strict=True):
            cache.copy_(old)
        for segment in batch.sequences:
            segment.cache.states.of(0).tip = None
        assert torch.equal(NativeRun(parts)(*rows), expected), seed
        assert all(map(torch.equal, block.caches, kept)), seed
        assert states is None or torch.equal(kept_by(batch.sequences), states), seed


def test_runs_that_misfit_are_refused_by_the_rule(instructions: Library) -> None:
    for seed in range(DRAWS):
        own = seeded(seed, 2)
        _, parts, rows = random_run(own)
        x = rows[0]
        wide = silu_mlp(any_weight(64, x.shape[1] + 32, own)[0], any_weight(x.shape[1] + 32, 32, own)[0])
        with pytest.raises(RuntimeError, match="do not agree: there is a sub-layer or more, all of x's width"):
            NativeRun([*parts, NativeSubLayer(0, 0, wide)])(*rows)
        empty = NativeSubLayer(0, 0, wide)
        empty.about.gate_up = empty.about.down = None
        with pytest.raises(RuntimeError, match="do not agree: weights, rows, results and memory are given"):
            NativeRun([*parts, empty])(*rows)
        with pytest.raises(RuntimeError, match="do not agree: there is a sub-layer or more"):
            NativeRun([])(*rows)
