"""The MLP block of a mixture: a router sends each row to a few of many experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from ssd_profiles.errors import UserError
from ssd_runtime.model.batch.builder import MOST_BY_ROW
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.layer.mlp import LayerActivation, Mlp
from ssd_runtime.model.layer.norm import Norm
from ssd_runtime.model.mixers.mixer import exact
from ssd_runtime.weights.hooks import hooked
from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.kernels.native_mlp import (
    Activation,
    Function,
    NativeExperts,
    NativeMlp,
    Router,
    Routing,
    Shared,
)
from ssd_runtime.weights.linear import Linear, PackedMemory, is_exact, is_read, stamp_of, written
from ssd_runtime.weights.packed_linear import PackedExperts

GEMMA_ROUTER = ("proj", "scale", "per_expert_scale", "scalar_root_size", "eps")
"""Attributes of Gemma-4's router."""
PROBED = 16
"""Rows that tell the form of a router, and numbers that tell that of an activation."""


class Experts:
    """The sum of the outputs of a row's experts, each times the weight that the router gives it.

    There may be a further expert that all rows go to.

    The router is the user's module, with a precision of its own, unless our own code computes the whole block
    (`NativeExperts`). A row whose last bits differ may go to other experts.
    So where all else computes a row alike in a step and in a verification (`by_row`, or kernels that do by themselves),
    this does too, for up to `MOST_BY_ROW` rows: what rounds a row by the number of rows runs row by row.
    """

    def __init__(
        self,
        block: Any,
        family: Family,
        memory: PackedMemory,
        by_row: bool = False,
        shared: Mlp | None = None,
    ) -> None:
        """`block` has a module `experts`, the router of its `family` and the norms that this names `beside`.

        All rows go to the expert `shared`, too. Raises UserError for a router or experts of an unknown form.
        """
        if isinstance(getattr(block, str(family.router)), nn.Linear):
            raise UserError("model: its router is a plain projection, as in older transformers; install a newer one")
        self._block, self._family, self._by_row, self._shared = block, family, by_row, shared
        self._norms = [Norm(block, name, family.norm_offset) for name in family.beside or ()]
        experts: Any = getattr(block, "experts", None)
        packed = isinstance(experts, PackedExperts)
        self._parts = list(experts.each) if packed else _views(experts)
        names = ("gate_proj", "up_proj", "down_proj")
        self._packed: list[nn.Module] = (
            [getattr(part, name) for part in self._parts for name in names] if packed else []
        )
        """Projections of packed experts, whose weights are no parameters; they may get hooks."""
        self._stamp = self._found()
        # GPT-OSS has no activation, but joins gate and up in a way of its own.
        has_one = getattr(experts, "act_fn", None) is not None
        self._activation = LayerActivation(experts, "act_fn") if has_one else None
        gated = None if has_one else experts.gated_halves if packed else experts._apply_gate
        self._mlps = [
            Mlp(
                gate_up=Linear(
                    part, ("gate_proj", "up_proj") if packed else ("gate_up_proj",), memory, reordered=False
                ),
                activation=self._activation,
                gated=gated,
                down=Linear(part, ("down_proj",), memory, reordered=False),
            )
            for part in self._parts
        ]
        self._follow()

    def _follow(self) -> None:
        """Rebuild what our own code computes: all experts, and the block with its router."""
        found = self._natives()
        router = router_of(self._router, *self._biases()) if found else None
        # That of a block with norms receives other rows than experts.
        self._whole = NativeExperts(found, None if self._norms else router) if found else None
        self._joined = self._native_block(found, router)

    @property
    def native(self) -> NativeExperts | None:
        """The block with its router as one call of our own code; None if that does not serve all of it."""
        return None if any(map(hooked, self.uncalled)) else self._joined

    @property
    def uncalled(self) -> tuple[nn.Module, ...]:
        """The router, and what belongs to all rows' expert (`Layer.uncalled`); other experts with hooks are refused."""
        gate = () if self._shared_gate is None else (self._shared_gate,)
        return *self._router.modules(), *gate, *(() if self._shared is None else self._shared.uncalled)

    def __call__(self, x: Tensor, states: Tensor) -> Tensor:
        """The block's output [n, hidden] for normed rows `x` [n, hidden], which are `states` before their norm."""
        if not self._norms:
            routed, shared = self._sum(x, x), self._of_all(x)
            return routed if shared is None else routed + shared
        before, after, shared_after = self._norms
        shared = self._of_all(x)
        assert shared is not None, "experts lie beside an MLP block"
        return shared_after(shared) + after(self._sum(before(states), states))

    def _sum(self, x: Tensor, routed: Tensor) -> Tensor:
        """The weighted sum [n, hidden] of the outputs of the experts of rows `x`, whom the router sees as `routed`."""
        few = len(x) <= MOST_BY_ROW
        called = any(map(hooked, self._router.modules()))
        if self._whole is not None and self._whole.routes and routed is x and not called:
            return self._whole(x, None)
        weights, chosen = self._routed(routed, few and self._apart)
        if self._whole is not None and not self._whole.routes:
            return self._whole(x, None, (weights, chosen))
        count = chosen.shape[1]
        ordered, order = chosen.flatten().sort(stable=True)
        hit, sizes = (each.tolist() for each in ordered.unique_consecutive(return_counts=True))
        groups = zip(hit, x[order // count].split(sizes), strict=True)
        found = torch.cat([_output(self._mlps[expert], rows, few and self._by_row) for expert, rows in groups])
        parts = torch.empty_like(found)
        parts[order] = found
        # torch's sum over a dimension may add in an order that depends on the number of rows.
        total, *others = (parts.view(len(x), count, -1) * weights[..., None]).unbind(1)
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def _of_all(self, x: Tensor) -> Tensor | None:
        """The output [n, hidden] of the expert of all rows; None without one."""
        if self._shared is None:
            return None
        few = len(x) <= MOST_BY_ROW
        out = _output(self._shared, x, few and self._by_row)
        if (gate := self._shared_gate) is None:
            return out
        factors = torch.cat([gate(row) for row in x.split(1)]) if few and self._apart else gate(x)
        return exact(torch.sigmoid, factors) * out

    @property
    def _apart(self) -> bool:
        """Whether few rows are routed one by one."""
        return self._by_row or isinstance(self._block.experts, PackedExperts)

    def linears(self) -> tuple[Linear, ...]:
        """The projections of all experts, but light copies."""
        shared = () if self._shared is None else self._shared.linears()
        return shared + tuple(linear for mlp in self._mlps for linear in mlp.linears())

    def light(self, bits: int) -> Experts:
        """This block on the light copies of its experts (`Linear.light`), as far as it has these."""
        lightened = copy(self)
        lightened._mlps = [mlp.light(bits) for mlp in self._mlps]
        lightened._shared = None if self._shared is None else self._shared.light(bits)
        lightened._follow()
        return lightened

    def refresh(self) -> bool:
        """Follow changes of the user's modules; returns whether there were any."""
        before, self._stamp = self._stamp, self._found()
        others = [part.refresh() for part in (*self._norms, self._shared) if part is not None]
        activation = self._activation is not None and self._activation.refresh()
        if before == self._stamp and not activation and not any(others):
            return False
        if not isinstance(self._block.experts, PackedExperts):
            for part, fresh in zip(self._parts, _views(self._block.experts), strict=True):
                part._modules.update(fresh._modules)
        for linear in self.linears():
            linear.refresh()
        self._follow()
        return True

    def _native_block(self, experts: Sequence[NativeMlp], router: Router | None) -> NativeExperts | None:
        """The block as one call of our own code, which computes these experts; None if it does not compute the rest."""
        if router is None or self._shared is None:
            return self._whole if router is not None else None
        mlp, norms, gate = self._shared.native, [norm.rms for norm in self._norms], self._shared_gate
        if (
            mlp is None
            or None in norms
            or (norms and router.norm is None)  # it receives the states, not the rows of experts
            or bytes(mlp.activation) != bytes(experts[0].activation)
        ):
            return None
        if gate is None:
            return NativeExperts(experts, router, Shared(mlp, None, *norms))
        if not is_exact(gate) or gate.bias is not None or hooked(gate) or not is_read(gate.weight):
            return None
        return NativeExperts(experts, router, Shared(mlp, gate.weight.detach(), *norms))

    @property
    def _shared_gate(self) -> nn.Module | None:
        """The user's module of the factor of all rows' expert."""
        return None if self._family.shared_gate is None else getattr(self._block, self._family.shared_gate)

    @property
    def _router(self) -> nn.Module:
        """The user's router."""
        router: nn.Module = getattr(self._block, str(self._family.router))
        return router

    def _natives(self) -> Sequence[NativeMlp]:
        """All experts as our own code computes them in one call; none where it does not."""
        clamp = clamp_of(self._block.experts)
        served = [mlp.native if clamp is None else mlp.joined_by(clamp) for mlp in self._mlps]
        found = [each for each in served if each is not None]
        alike = len({(each.gate_up.name, each.down.name) for each in found}) == 1
        return found if len(found) == len(served) and alike else ()

    def _found(self) -> list[Any]:
        gates = [] if self._shared_gate is None else [self._shared_gate]
        modules = [self._block.experts, *self._router.modules(), *gates]
        found = stamp_of(modules) + [written(bias) for bias in self._biases() if bias is not None]
        return found + [each for each in self._packed if hooked(each)]

    def _biases(self) -> tuple[Tensor | None, ...]:
        """The bias that the router receives beside rows, None where the model lacks it; empty for other families."""
        name = self._family.router_bias
        return () if name is None else (getattr(self._block, name, None),)

    def _routed(self, x: Tensor, by_row: bool) -> tuple[Tensor, Tensor]:
        """Weights [n, k] and experts [n, k] of rows `x`, the last two results of the router."""
        router, biases = self._router, self._biases()
        if len(x) == 1 or not by_row:
            return router(x, *biases)[-2:]
        weights, chosen = zip(*(router(row, *biases)[-2:] for row in x.split(1)), strict=True)
        return torch.cat(weights), torch.cat(chosen)


def router_of(module: nn.Module, *biases: Tensor | None) -> Router | None:
    """A router as our own code computes it; None unless it chooses and weighs the experts of some rows so.

    `biases` is what it receives beside rows: the bias of its choice.
    """
    router: Any = module
    inner, scale, factors = router, None, None
    if all(hasattr(router, name) for name in GEMMA_ROUTER):
        inner, scale, factors = router.proj, router.scale, router.per_expert_scale
        if not is_exact(inner):
            return None
    weight, bias = getattr(inner, "weight", None), getattr(inner, "bias", None)
    given = (each for each in (bias, scale, factors, *biases) if each is not None)
    if any(map(hooked, router.modules())) or not is_read(weight) or not all(map(is_read, given)):
        return None
    rows = probe = torch.randn(PROBED, weight.shape[1], generator=torch.Generator().manual_seed(0))
    weights, chosen = router(probe, *biases)[-2:]
    norm = None if scale is None else RmsNorm(scale.detach() * router.scalar_root_size, router.eps)
    if norm is not None:
        rows = nn.functional.rms_norm(probe, norm.weight.shape, norm.weight, router.eps)
    scores = nn.functional.linear(rows, weight, bias)
    shares, best = scores.softmax(-1).topk(chosen.shape[1])
    forms = {Routing.SOFTMAX: (bias, shares, best), Routing.SHARES: (bias, shares / shares.sum(-1, keepdim=True), best)}
    if bias is None:
        sigmoids, added = scores.sigmoid(), next(iter(biases), None)
        best = (sigmoids if added is None else sigmoids + added).topk(chosen.shape[1]).indices
        shares = sigmoids.gather(1, best)
        forms[Routing.SIGMOIDS] = added, shares / (shares.sum(-1, keepdim=True) + 1e-6), best
    for form, (read, expected, found) in forms.items():
        expected = expected if factors is None else expected * factors[found]
        if torch.equal(found, chosen) and torch.allclose(expected, weights, rtol=1e-4):
            kept = [None if each is None else each.detach() for each in (read, factors)]
            return Router(
                weight=weight.detach(),
                bias=kept[0],
                each=chosen.shape[1],
                routing=form,
                factors=kept[1],
                norm=norm,
            )
    return None


def clamp_of(experts: PackedExperts | nn.Module) -> Activation | None:
    """The activation of experts, if it is the clamped one; None for others."""
    if not isinstance(experts, PackedExperts) or experts.clamp is None:
        return None
    alpha, limit = experts.clamp
    gate, up = torch.linspace(-2, 2, PROBED) * limit, torch.linspace(2, -2, PROBED).roll(5) * limit
    bounded = gate.clamp(max=limit)
    expected = bounded * torch.sigmoid(bounded * alpha) * (up.clamp(-limit, limit) + 1)
    matches = torch.allclose(experts.joined(gate, up), expected)
    return Activation(Function.CLAMPED, alpha, limit) if matches else None


def _output(mlp: Mlp, x: Tensor, by_row: bool) -> Tensor:
    """An expert's output for its rows `x` [n, hidden]."""
    if (native := mlp.native) is not None:
        return native(x, None)
    if not by_row or len(x) == 1:
        return mlp.down(mlp.inner(x))
    return torch.cat([mlp.down(mlp.inner(row)) for row in x.split(1)])


def _views(experts: Any) -> list[nn.Module]:
    """Modules `gate_up_proj` and `down_proj` of each expert, whose weights are views of those of `experts`.

    Raises UserError unless these are [experts, out, in] or [experts, in, out], as transformers keeps them.
    """
    names = ("gate_up_proj", "down_proj")
    found: dict[str, Any] = dict(experts.named_parameters()) if isinstance(experts, nn.Module) else {}
    known = all(type(each) is nn.Parameter and each.is_floating_point() for each in found.values())
    if not known or not set(names) <= set(found) <= {*names, *(f"{name}_bias" for name in names)}:
        raise UserError(
            "model: its experts are not kept as transformers keeps those of a mixture; load the model unquantised with "
            "a newer transformers"
        )
    if any(each.is_meta for each in found.values()):
        raise UserError("model: experts cannot be offloaded; load the model on one device that holds it")
    transposed = are_transposed(found["gate_up_proj"], found["down_proj"])
    return [
        nn.ModuleDict({name: _linear(found, name, number, transposed) for name in names})
        for number in range(len(found["down_proj"]))
    ]


def are_transposed(gate_up: Tensor, down: Tensor) -> bool:
    """Whether the weights of all experts are [experts, in, out] and not [experts, out, in]."""
    return gate_up.shape[1] == down.shape[2]


def _linear(found: Mapping[str, Tensor], name: str, expert: int, transposed: bool) -> nn.Linear:
    """A module that multiplies by the memory of an expert's weight itself, not by a copy."""
    weight = found[name].detach()[expert]
    bias = found.get(f"{name}_bias")
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.weight = nn.Parameter(weight.T if transposed else weight, requires_grad=False)
    linear.out_features, linear.in_features = linear.weight.shape
    if bias is not None:
        linear.register_parameter("bias", nn.Parameter(bias.detach()[expert], requires_grad=False))
    return linear
