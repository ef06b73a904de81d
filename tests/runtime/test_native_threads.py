"""The threads of our own C code: no bit depends on them, and they serve whatever a process does with its own."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.native_attention import NativeAttention
from ssd_runtime.model.rotary import Rotation
from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.native.library import library
from tests.gguf_files import quantised_pair
from tests.native_weights import weight4, weight8

pytestmark = pytest.mark.usefixtures("threads")
needs_native = pytest.mark.usefixtures("instructions")
SCRIPT = """
import os, sys, torch
from ssd_runtime.weights.kernels.native import Native, quantised_groups

torch.set_num_threads(3)
torch.manual_seed(0)
kernel = Native(*quantised_groups(torch.randn(2048, 256)), None)
kernel.own_threads = sys.argv[1] == "own"
x = torch.randn(2, 256)
"""


def any_weight(out: int, width: int, own: bool) -> Native:
    """A random weight of 4 or 8 bits that runs on threads of our own, or on torch's."""
    kernel, _ = random.choice([weight4, weight8])(out, width)
    kernel.own_threads = own
    return kernel


class Block:
    """A random attention block on random sequences."""

    def __init__(self, own: bool) -> None:
        self.head_dim, group = random.choice([16, 32, 64]), random.choice([1, 2, 3])
        kv_heads = random.choice([2, 4])
        heads, self.hidden = kv_heads * group, 32 * random.randint(1, 6)
        norm = RmsNorm(torch.rand(self.hidden), 1e-5)
        head_norm = random.choice([None, RmsNorm(torch.rand(self.head_dim), 1e-6)])
        sizes = random.choice([[heads + 2 * kv_heads], [heads + kv_heads, kv_heads], [heads, kv_heads, kv_heads]])
        self.attention = NativeAttention(
            qkv=[any_weight(size * self.head_dim, self.hidden, own) for size in sizes],
            output=any_weight(self.hidden // 16 * 16, heads * self.head_dim, own),
            norm=norm,
            q_norm=head_norm,
            k_norm=head_norm,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
        )
        self.rows = [random.choice([1, 2, 7, 20]) for _ in range(random.choice([1, 1, 3]))]
        self.known = [random.randint(0, 200) for _ in self.rows]
        self.caches = [torch.randn(2, kv_heads, known + rows, self.head_dim) for known, rows in self.pairs()]
        self.biases = [random.choice([None, self.bias(*pair)]) for pair in self.pairs()]
        angles = torch.rand(sum(self.rows), self.head_dim)
        self.rotation: Rotation = (angles.cos(), angles.sin())

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.known, self.rows, strict=True))

    @staticmethod
    def bias(known: int, rows: int) -> Tensor:
        visible = torch.rand(rows, known + rows) < 0.7
        visible[:, known:].fill_diagonal_(True)
        return torch.zeros(rows, known + rows).masked_fill_(~visible, -torch.inf)

    def __call__(self, x: Tensor) -> Tensor:
        """The block's output, and the keys and values that it wrote."""
        caches = [cache.clone() for cache in self.caches]
        segments = []
        for cache, bias, (known, rows) in zip(caches, self.biases, self.pairs(), strict=True):
            keys, values = cache
            address = keys.data_ptr(), values.data_ptr(), keys.stride(0)
            view = SimpleNamespace(begin=0, end=known + rows, bias=bias)
            owner = SimpleNamespace(address=lambda layer, begin, address=address: address)
            segments.append(SimpleNamespace(views=[view], rows=rows, slot=known, cache=owner))
        y = self.attention(0, 0, x, segments, self.rotation)  # type: ignore[arg-type]
        return torch.cat([y.flatten(), *(cache.flatten() for cache in caches)])


@needs_native
@pytest.mark.parametrize("own", [True, False], ids=["our threads", "torch's threads"])
def test_no_bit_depends_on_who_computes(own: bool) -> None:
    """Any number of threads has the bits of one, with weights, rows, sequences and caches of random shapes."""
    for seed in range(40):
        torch.manual_seed(seed)
        random.seed(seed)
        block = Block(own)
        hidden, inner, n = block.hidden, 32 * random.randint(1, 20), random.choice([1, 2, 8, 9, 40])
        up, down = any_weight(2 * inner, hidden, own), any_weight(hidden, inner, own)
        norm = random.choice([None, RmsNorm(torch.rand(hidden), 1e-5)])
        x, rows = torch.randn(n, hidden), torch.randn(sum(block.rows), hidden)
        found = list[Tensor]()
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            product = down.fused(torch.rand(n, inner, generator=torch.Generator().manual_seed(seed)), None, x)
            found.append(torch.cat([up.fused_mlp(down, x, norm).flatten(), product.flatten(), block(rows)]))
        assert found[0].isfinite().all()
        assert all(torch.equal(found[0], each) for each in found), seed


@needs_native
def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(3)
    kernels = [any_weight(768, 64 * (i + 1), own=True) for i in range(4)]
    inputs = [torch.randn(3, kernel.in_features) for kernel in kernels]
    expected = [kernel(x) for kernel, x in zip(kernels, inputs, strict=True)]

    def same(index: int) -> bool:
        return all(torch.equal(kernels[index](inputs[index]), expected[index]) for _ in range(500))

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(same, range(4)))


@needs_native
def test_threads_round_as_their_caller_does() -> None:
    """Whether numbers too small for fp32's usual form become 0 is a setting of each thread."""
    torch.set_num_threads(2)
    kernel = any_weight(4096, 64, own=True)
    tiny = torch.full((1, 4096), 1e-40)
    assert torch.equal(kernel.fused(torch.zeros(1, 64), None, tiny), tiny)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such setting")
    try:
        flushed = [kernel.fused(torch.zeros(1, 64), None, tiny) for _ in range(50)]
    finally:
        torch.set_flush_denormal(False)
    assert not any(each.view(torch.int32).any() for each in flushed)


@needs_native
def test_torch_has_one_thread_between_steps_in_the_calling_thread_alone() -> None:
    found = library()
    assert found is not None
    torch.set_num_threads(3)
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(torch.get_num_threads).result() == 3
        with pytest.raises(KeyError), found.torch_alone():
            assert torch.get_num_threads() == 1
            assert executor.submit(torch.get_num_threads).result() == 3
            raise KeyError
    assert torch.get_num_threads() == 3


def run(work: str, threads: str) -> subprocess.CompletedProcess[str]:
    """Run Python code after `SCRIPT`; a process that hangs fails."""
    command = [sys.executable, "-c", SCRIPT + work, threads]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(library() is None or not hasattr(__import__("os"), "fork"), reason="needs the C code and fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """And both processes end."""
    done = run(
        """
before = kernel(x)
child = os.fork()
after = kernel(x)
threads = len(os.listdir("/proc/self/task"))
if not child:
    os._exit(0 if torch.equal(before, after) and threads == 3 else 1)
assert os.waitpid(child, 0)[1] == 0 and torch.equal(before, after)
""",
        "own",
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(library() is None or not Path("/proc/self/task").exists(), reason="needs the C code and Linux")
def test_there_are_as_many_threads_as_torch_has() -> None:
    """A call starts those that are missing, and a lone one none."""
    done = run(
        """
counts = []
for threads in (2, 1, 2, 4, 3):
    torch.set_num_threads(threads)
    kernel(x)
    counts.append(len(os.listdir("/proc/self/task")))
print([count - counts[0] for count in counts])
""",
        "own",
    )
    assert (done.stdout, done.stderr) == ("[0, 0, 0, 2, 2]\n", "")


@pytest.mark.skipif(library() is None, reason="needs AVX2 and a C compiler")
@pytest.mark.parametrize(
    ("kinds", "head_dim", "own"),
    [({}, 16, True), ({"v_proj": Type.Q8_0}, 16, True), ({}, 48, False)],
    ids=["one kind", "values of another kind", "attention by torch"],
)
def test_a_model_runs_on_our_threads_if_all_its_sub_layers_are_our_code(
    kinds: dict[str, Type], head_dim: int, own: bool, tmp_path: Path
) -> None:
    packed, _, _ = quantised_pair(tmp_path, "llama", Type.Q4_0, kinds, head_dim=head_dim)
    decoder = Decoder(packed)
    natives = [native for linear in decoder.projections for native in linear.natives]
    assert decoder.sublayers.are_whole == own
    assert natives
    assert all(native.own_threads == own for native in natives)
