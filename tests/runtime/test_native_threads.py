"""The threads of our own C code: no bit depends on them, and they serve whatever a process does with its own."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from ssd_runtime.loading.checkpoints.sixteen_bits import keep_numbers
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.weights.kernels.native_mlp import NativeMlp
from ssd_runtime.weights.native.library import library
from tests.gguf_files import SIZES, quantised_pair
from tests.models import tiny_model
from tests.native_blocks import Block, any_activation, any_connection, any_weight

pytestmark = pytest.mark.usefixtures("threads")
needs_native = pytest.mark.usefixtures("instructions")
SCRIPT = """
import os, pathlib, time, torch
from ssd_runtime.weights.kernels.native import Native, rounded

torch.set_num_threads(1)
torch.manual_seed(0)
found = rounded(torch.randn(2048, 256), 8)
kernel = Native.of_blocks(found.kept, [found.blocks], 256)
kernel.own_threads = True
x = torch.randn(2, 256)

tasks = pathlib.Path("/proc/self/task")
def threads():
    return len(list(tasks.iterdir()))
def sleeps():
    texts = {each: (each / "status").read_text() for each in tasks.iterdir()}
    return {each: int(text.split("\\nvoluntary_ctxt_switches:")[1].split()[0]) for each, text in texts.items()}

# As many threads as torch has: a call starts those that are missing, and a lone one none.
counts = []
for count in (2, 1, 2, 4, 3):
    torch.set_num_threads(count)
    kernel(x)
    counts.append(threads())
print([count - counts[0] for count in counts])

# A forked process has threads of its own, and both processes end.
before = kernel(x)
child = os.fork()
after = kernel(x)
if not child:
    os._exit(0 if torch.equal(before, after) and threads() == 3 else 1)
print(os.waitpid(child, 0)[1], torch.equal(before, after))

# Threads that a call does not want sleep on: to wake them takes longer than a loop. A later call that wants them does.
for count in (9, 2, 9):
    torch.set_num_threads(count)
    kernel(x)
    time.sleep(0.2)
    before = sleeps()
    for _ in range(100):
        kernel(x)
        time.sleep(0.001)
    print(sum(count - before[each] > 10 for each, count in sleeps().items()))
"""


@needs_native
@pytest.mark.parametrize("own", [True, False], ids=["our threads", "torch's threads"])
def test_no_bit_depends_on_who_computes(own: bool) -> None:
    """Any number of threads has the bits of one, with weights, rows, sequences and caches of random shapes."""
    for seed in range(15):
        torch.manual_seed(seed)
        random.seed(seed)
        block = Block(own)
        hidden, inner, n = block.hidden, 32 * random.randint(1, 20), random.choice([1, 2, 8, 9, 40])
        up, down = any_weight(2 * inner, hidden, own)[0], any_weight(hidden, inner, own)[0]
        mlp, connection = NativeMlp(up, down, any_activation()), any_connection(hidden)
        x, rows = torch.randn(n, hidden), torch.randn(sum(block.rows), hidden)
        found = list[Tensor]()
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            product = down.fused(torch.rand(n, inner, generator=torch.Generator().manual_seed(seed)), None, x)
            found.append(torch.cat([mlp(x, connection).flatten(), product.flatten(), block(rows)]))
        assert found[0].isfinite().all()
        assert all(torch.equal(found[0], each) for each in found), seed


@needs_native
def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(3)
    kernels = [any_weight(768, 64 * (i + 1), own=True)[0] for i in range(4)]
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
    kernel, _ = any_weight(4096, 64, own=True)
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
    torch.set_num_threads(3)
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(torch.get_num_threads).result() == 3
        with pytest.raises(KeyError), found.torch_alone():
            assert torch.get_num_threads() == 1
            assert executor.submit(torch.get_num_threads).result() == 3
            raise KeyError
    assert torch.get_num_threads() == 3


@pytest.mark.skipif(library() is None or not Path("/proc/self/task").exists(), reason="needs the C code and Linux")
def test_threads_come_with_calls_and_forks_and_sleep_where_none_wants_them() -> None:
    """In a process of its own; one that hangs fails."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("[0, 0, 0, 2, 2]\n0 True\n9\n2\n9\n", "")


@pytest.mark.skipif(library() is None, reason="needs AVX2 and a C compiler")
@pytest.mark.parametrize(
    ("kinds", "head_dim", "own"),
    [({}, 16, True), ({"v_proj": Type.Q8_0}, 16, True), ({}, 48, False), ({"embed_tokens": Type.F32}, 16, False)],
    ids=["one kind", "values of another kind", "attention by torch", "head by torch"],
)
def test_a_model_runs_on_our_threads_if_all_of_it_is_our_code(
    kinds: dict[str, Type], head_dim: int, own: bool, tmp_path: Path
) -> None:
    packed, _, _ = quantised_pair(tmp_path, "llama", Type.Q4_0, kinds, head_dim=head_dim)
    decoder = Decoder(packed)
    natives = [native for linear in decoder.projections for native in linear.natives]
    assert natives
    assert all(native.own_threads == own for native in natives)


@pytest.mark.skipif(library() is None, reason="needs AVX2 and a C compiler")
def test_light_copies_run_on_the_threads_of_the_weights_beside_them() -> None:
    decoder = Decoder(keep_numbers(tiny_model("llama", **SIZES).bfloat16()))
    for bits in ("8", "4"):
        decoder.lighten(bits)
        copies = [copy for linear in decoder.projections for light in linear.copies.values() for copy in light.natives]
        assert copies
        assert all(copy.own_threads for copy in copies)
