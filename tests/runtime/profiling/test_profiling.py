"""Measurements are right on quiet machines, and kept from busy ones; processors and dtypes are told apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from time import perf_counter

import numpy as np
import pytest
import torch
from torch import nn

from ssd_profiles.latency import LatencyTable
from ssd_profiles.latency_law import broken_law
from ssd_runtime.devices.device import device_identity, device_name
from ssd_runtime.devices.threads import use_threads
from ssd_runtime.engine.latency_tables import LatencyTables
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.fit import DRAFT_HEAD, Samples, fitted
from ssd_runtime.profiling.kernel_choice import ROWS, choice
from ssd_runtime.profiling.latency import BusyMachineError, bundled_latency, device_key, latency_path, measure_latency
from ssd_runtime.profiling.light import with_light
from ssd_runtime.profiling.other_work import OtherWork, busy_note
from ssd_runtime.profiling.shared_steps import NONE
from ssd_runtime.weights.kernels.onednn import can_serve
from ssd_runtime.weights.linear import Linear, PackedMemory
from tests.clocks import StandInMachine
from tests.models import tiny_model
from tests.tables import DEVICE, latency_table, table_of, with_light_costs

LAYERS = 4
KEY = "k" * 64


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny_model("llama"))


def tenfold(begin: float, end: float) -> Callable[[float], float]:
    """A neighbour from one time to another, beside whom everything takes ten times as long."""
    return lambda time: 10.0 if begin <= time < end else 1.0


def bursts(seed: int, share: float = 0.5) -> Callable[[float], float]:
    """A neighbour who takes the processors for a part of the time, in turns of 20 ms."""
    return lambda time: 15.0 if Random(f"{seed} {time // 0.02}").random() < share else 1.0


def assert_quiet(table: LatencyTable, machine: StandInMachine, pace: float = 1.0) -> None:
    """The table is that of the quiet machine at a pace."""
    assert table.mlp[0] == pytest.approx(1.01 * pace * machine.MLP, rel=0.05)
    assert table.attention["full"][0, 0] == pytest.approx(1.01 * pace * machine.ATTENTION, rel=0.05)
    for rows in (1, 5, 32):
        assert table.step_seconds(16, rows) == pytest.approx(pace * machine.step_seconds(rows, LAYERS), rel=0.05)


def test_a_quiet_machines_table_is_right_and_obeys_the_law(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = StandInMachine(monkeypatch)
    table = measure_latency(decoder)
    assert_quiet(table, machine)
    assert broken_law(table) is None
    np.testing.assert_allclose(table.overhead, 1.01 * machine.EMBEDDING, rtol=0.4)
    assert table.draft_head == pytest.approx(machine.DRAFT_HEAD)


def test_a_neighbour_who_comes_or_goes_does_not_part_steps_from_their_parts(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medians of two moments would: parts of the slow one were 0.98 s longer than whole steps of the quick one."""
    whole = StandInMachine(monkeypatch)
    measure_latency(decoder, 1e6)
    for share in (0.05, 0.4, 0.95):
        for begin, end in ((0.0, share), (share, 11.0)):
            machine = StandInMachine(monkeypatch, tenfold(begin * whole.time, end * whole.time))
            # Slow work takes longer, so that the neighbour's time ends later than at `share` of all works.
            table = measure_latency(decoder, 1e6)
            assert np.all(np.abs(table.overhead) < 0.1 * table.step_seconds(16, 32)), (begin, end, table.overhead)
            assert_quiet(table, machine, pace=10.0 if table.mlp[0] > 3e-3 else 1.0)


@pytest.mark.parametrize("seed", range(2))
def test_bursts_leave_no_table_but_a_coarse_one(seed: int, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = StandInMachine(monkeypatch, bursts(seed))
    with pytest.raises(BusyMachineError) as caught:
        measure_latency(decoder, 5.0)
    coarse = caught.value.coarse
    coarse.check()
    assert broken_law(coarse) is not None, "it is never taken for a sound one"
    assert np.all(coarse.overhead > -1e-9)
    for rows in (1, 5, 32):
        assert coarse.step_seconds(16, rows) == pytest.approx(machine.step_seconds(rows, LAYERS), rel=0.2)
    assert "processors busy" in str(caught.value)


def test_a_busy_run_goes_on_with_coarse_latencies_and_keeps_none(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.others_during", lambda _: 0.0)
    machine = StandInMachine(monkeypatch, bursts(1))
    said = list[str]()
    tables = LatencyTables(decoder, None, KEY, "none", say=said.append)
    assert tables.table.step_seconds(16) == pytest.approx(machine.step_seconds(1, LAYERS), rel=0.2)
    measuring, busy = said
    assert measuring.startswith("first run of this model")
    assert busy.startswith("this device cannot be measured now (")
    assert busy.endswith(
        "its latencies are coarse until another run measures again; --threads leaves processors to other programs"
    )
    assert not latency_path(decoder, KEY).exists()
    machine.slowness = lambda _: 1.0
    later = LatencyTables(decoder, None, KEY, "none", say=said.append)
    assert_quiet(later.table, machine)
    assert latency_path(decoder, KEY).exists()
    assert said[2:] == [measuring]


@pytest.mark.usefixtures("any_machine")
def test_a_cache_that_cannot_be_written_is_told(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setenv("SSD_CACHE", str(occupied))
    machine, said = StandInMachine(monkeypatch), list[str]()
    assert_quiet(LatencyTables(decoder, None, KEY, "none", say=said.append).table, machine)
    assert said[1:] == [
        f"{occupied} cannot be written, so every run measures anew; set SSD_CACHE to a folder that can be"
    ]


@pytest.mark.parametrize(
    ("others", "threads", "kept"), [(0.4, 2, True), (1.4, 2, False), (1.4, 1, True), (1.9, 1, False)]
)
def test_a_machine_of_which_others_have_half_is_not_measured(
    others: float, threads: int, kept: bool, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first run is short there, and the next one is as well."""
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.others_during", lambda _: others)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    machine, said = StandInMachine(monkeypatch), list[str]()
    tables = LatencyTables(decoder, None, KEY, "none", say=said.append)
    assert_quiet(tables.table, machine)
    assert latency_path(decoder, KEY).exists() == kept
    assert len(said) == 1
    if kept:
        assert "measuring this device for about half a minute" in said[0]
    else:
        assert machine.time < 20.0
        assert f"(other processes keep {others} of 2 processors busy)" in said[0]


def test_costs_of_lighter_copies_are_kept_where_the_machine_was_steady(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    lighter = Decoder(tiny_model("llama"))
    lighter.lighten("8")
    table = replace(latency_table(LAYERS), device=device_key(lighter))
    machine = StandInMachine(monkeypatch, bursts(2))
    with pytest.raises(BusyMachineError) as caught:
        with_light(table, lighter, KEY)
    assert set(caught.value.coarse.light) == {8}
    assert broken_law(caught.value.coarse) is not None
    assert not list(tmp_path.rglob("light/*/*"))
    machine.slowness = lambda _: 1.0
    sound = with_light(table, lighter, KEY)
    assert broken_law(sound) is None
    costs, light = sound.light[8], (machine.LIGHT_ATTENTION, machine.LIGHT_MLP, machine.LIGHT_HEAD)
    for found, share in zip((costs.attention["full"], costs.mlp, costs.head), light, strict=True):
        np.testing.assert_allclose(found, share)
    full = LAYERS * machine.ATTENTION, LAYERS * machine.MLP, machine.HEAD
    step = sum(seconds * share for seconds, share in zip(full, light, strict=True)) + machine.EMBEDDING
    np.testing.assert_allclose(costs.step, step / (sum(full) + machine.EMBEDDING), rtol=1e-3)
    [kept] = tmp_path.rglob("light/*/*.json")
    assert set(json.loads(kept.read_text())) == {"8"}


@pytest.mark.parametrize(
    ("others", "threads", "processors", "advice"),
    [
        (1.0, 2, 2, "--threads 1 "),
        (1.9, 2, 2, "--threads 1 "),
        (6.2, 8, 16, None),
        (6.2, 16, 16, "--threads 10 "),
        (0.1, 2, 2, None),
        (1.0, 1, 2, None),
        (2.0, 1, 2, None),
    ],
)
def test_advice_leaves_processors_to_others(others: float, threads: int, processors: int, advice: str | None) -> None:
    found = busy_note(others, threads, processors)
    assert (found is None) if advice is None else (found is not None and advice in found)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        *((files, 4) for files in ({}, {"cpu.max": "max 100000"}, {"cpu.max": "900000 100000"}, {"cpu.max": "?"})),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_a_containers_quota_bounds_the_threads_that_nobody_asked_for(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr("ssd_runtime.devices.threads.CGROUP", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        use_threads(None)
        assert torch.get_num_threads() == expected
        use_threads(7)
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)


def test_others_work_is_seen_and_ones_own_is_not() -> None:
    def seen(seconds: float) -> float:
        watch = OtherWork()
        while perf_counter() < watch.began + seconds:
            pass
        return watch.processors()

    quiet = min(seen(0.5) for _ in range(3))  # the machine may be busy, but not by this process
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        busy = max(seen(0.5) for _ in range(6))
    finally:
        other.kill()
        other.wait()
    assert busy > 0.25
    assert quiet < (os.cpu_count() or 1) - 0.4


@pytest.mark.skipif(not can_serve(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no bf16 instructions")
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_packed_bf16_copy_computes_the_modules_rows(rows: int) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(64, 48).bfloat16(), nn.Linear(64, 16, bias=False).bfloat16()]
    memory = PackedMemory(1 << 20)
    linear = Linear(nn.Sequential(*modules), ("0", "1"), memory)
    x = torch.randn(rows, 64).bfloat16()
    assert linear.packed
    assert memory.used == 2 * 64 * 64
    expected = torch.cat([module(x) for module in modules], -1)
    torch.testing.assert_close(linear(x), expected, atol=0.02, rtol=0.02)


CPU = torch.device("cpu")
X86 = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: avx2\nbogomips\t: 5000\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


def test_processors_of_one_name_are_told_apart_by_what_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_runtime.devices.device.CPU_INFO", tmp_path / "cpuinfo")
    assert device_name(CPU)
    assert device_identity(CPU).startswith(device_name(CPU)), "without the file, too"

    def told(text: str) -> str:
        (tmp_path / "cpuinfo").write_text(text)
        return device_identity(CPU)

    assert told(X86).startswith("AMD EPYC (")
    assert told(X86) == told(X86.replace("5000", "4999")), "this changes from start to start"
    for text, old, new in (
        (X86, "model\t\t: 1", "model\t\t: 17"),
        (X86, "avx2", "avx2 avx512f"),
        (ARM, "0xd0c", "0xd40"),
    ):
        assert told(text) != told(text.replace(old, new))


def test_the_modules_serve_where_they_are_faster_in_every_round() -> None:
    """Modules that are faster by no more than noise leave the packed copies in place."""
    taken = {(rows, packed): [1.0, 1.0] for rows in ROWS for packed in (False, True)}
    taken[ROWS[0], False] = [0.5, 0.9]
    taken[ROWS[1], False] = [0.5, 0.97]
    taken[ROWS[2], False] = [2.0, 2.0]
    assert choice(taken) == [False, *[True] * (len(ROWS) - 1)]


KINDS = ("full", "full", "sliding")


def sweeps(*paces: float, far: float = 1.5) -> Samples:
    """Figures of a model of three layers, a sweep at each pace; the far context takes `far` times as long."""
    found = list[dict[str, float]]()
    for pace in paces:
        sweep = {DRAFT_HEAD: 0.1 * pace, "head 1": 0.2 * pace}
        for n in (1, 4):
            rows = pace * (1.0 + n / 10)
            parts = {"plain": pace, "step": rows, "mlp": 0.3 * rows, "head": 0.2 * rows}
            parts |= {
                f"{kind} {context}": kind_share * rows * (far if context > 16 else 1.0)
                for kind, kind_share in (("full", 0.2), ("sliding", 0.05))
                for context in (16, 256)
            }
            sweep |= {f"{name} {n}": seconds for name, seconds in parts.items()}
        found.append(sweep)
    return Samples(device=DEVICE, layer_kinds=KINDS, queries=(1, 4), contexts=(16, 256), sweeps=found)


def test_figures_are_a_layers_share_of_passes_whatever_the_pace_of_their_sweeps() -> None:
    table = fitted(sweeps(1.0, 2.0, 3.0), NONE)
    rows = 2.0 * np.array([1.1, 1.4])
    np.testing.assert_allclose(table.mlp, 0.3 * rows / 3)
    np.testing.assert_allclose(table.head, 0.2 * rows)
    np.testing.assert_allclose(table.attention["full"], np.outer([1.0, 1.5], 0.2 * rows / 2))
    np.testing.assert_allclose(table.attention["sliding"], np.outer([1.0, 1.5], 0.05 * rows))
    np.testing.assert_allclose(table.parts + table.overhead, rows / 1.1, err_msg="a step of one row is a plain one")
    assert table.draft_head == pytest.approx(0.1 / 0.22)
    assert max(values.max() for values in table.spread.values()) < 1e-9
    assert fitted(sweeps(1.0, 2.0), NONE).spread == {}, "too few"


def test_a_longer_context_that_seemed_quicker_counts_as_the_same() -> None:
    """Else a table would go on falling beyond the last one."""
    table = fitted(sweeps(1.0, 1.0, 1.0, far=0.8), NONE)
    np.testing.assert_allclose(table.attention["full"][0], table.attention["full"][1])
    np.testing.assert_allclose(table.attention["full"][0], 0.9 * 0.1 * np.array([1.1, 1.4]))


def test_of_a_bundles_tables_a_sound_one_of_this_device_and_model_is_used(decoder: Decoder) -> None:
    table = table_of(decoder)
    slug = table.device.slug()
    assert bundled_latency(decoder, {slug: table, "other": latency_table(LAYERS)}) is table
    wide = replace(
        table,
        layer_kinds=("wide",) * LAYERS,
        attention={"wide": table.attention["full"]},
        spread={**table.spread, "wide": table.spread["full"]},
    )
    assert broken_law(wide) is None
    for tables in ({}, {"other": table}, {slug: replace(table, spread={})}, {slug: wide}):
        assert bundled_latency(decoder, tables) is None


def test_a_table_that_has_the_costs_of_all_copies_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lighter = Decoder(tiny_model("llama"))
    lighter.lighten("8")
    monkeypatch.setattr("ssd_runtime.profiling.light.measure_light", lambda *_: pytest.fail("measured"))
    table = with_light_costs(table_of(lighter), 0.5, (8, 4))
    assert with_light(table, lighter, KEY).light == {8: table.light[8]}
