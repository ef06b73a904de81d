"""On a machine where others work too, a latency table is right or there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ssd_profiles.latency import LatencyTable
from ssd_profiles.latency_law import broken_law
from ssd_runtime.engine.latency_tables import LatencyTables
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.latency import BusyMachineError, device_key, known_latency, latency_path, measure_latency
from ssd_runtime.profiling.light import with_light
from tests.clocks import StandInMachine
from tests.models import tiny_model
from tests.tables import latency_table

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


def test_a_neighbour_who_comes_or_goes_does_not_part_steps_from_their_parts(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medians of two moments would: parts of the slow one were 0.98 s longer than whole steps of the quick one."""
    whole = StandInMachine(monkeypatch)
    measure_latency(decoder, 1e6)
    for share in np.linspace(0.05, 0.95, 19):
        for begin, end in ((0.0, share), (share, 11.0)):
            machine = StandInMachine(monkeypatch, tenfold(begin * whole.time, end * whole.time))
            # Slow work takes longer, so that the neighbour's time ends later than at `share` of all works.
            table = measure_latency(decoder, 1e6)
            assert np.all(np.abs(table.overhead) < 0.1 * table.step_seconds(16, 32)), (begin, end, table.overhead)
            assert_quiet(table, machine, pace=10.0 if table.mlp[0] > 3e-3 else 1.0)


@pytest.mark.parametrize("seed", range(5))
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


def test_a_single_sample_of_each_figure_is_no_table(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step takes ten times as long, time ends before there are three. One alone seems to have no noise."""
    StandInMachine(monkeypatch, lambda _: 10.0)
    with pytest.raises(BusyMachineError, match="too few samples"):
        measure_latency(decoder, 1.0)


def poisoned(decoder: Decoder) -> LatencyTable:
    """A table of a busy machine: steps take 0.98 s less than their parts."""
    table = replace(latency_table(LAYERS), device=device_key(decoder))
    return replace(table, overhead=table.overhead - 0.98)


def test_a_table_that_breaks_the_law_is_measured_again(decoder: Decoder) -> None:
    bad = poisoned(decoder)
    sound = replace(latency_table(LAYERS), device=bad.device)
    path = latency_path(decoder, KEY)
    path.parent.mkdir(parents=True)
    path.write_text(bad.to_json())
    found = known_latency(decoder, {bad.device.slug(): bad}, KEY, lambda: sound)
    assert found is sound
    assert path.read_text() == sound.to_json()
    again = known_latency(decoder, {}, KEY, lambda: bad)
    assert again.to_json() == sound.to_json()


def test_a_busy_run_goes_on_with_coarse_latencies_and_keeps_none(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.others_during", lambda _: 0.0)
    machine = StandInMachine(monkeypatch, bursts(1))
    said = list[str]()
    tables = LatencyTables(decoder, None, KEY, "none", when_busy=said.append)
    assert tables.table.step_seconds(16) == pytest.approx(machine.step_seconds(1, LAYERS), rel=0.2)
    assert len(said) == 1
    assert said[0].startswith("this device is too busy to be measured (")
    assert said[0].endswith("so this run plans with coarse latencies and the next one measures again")
    assert not latency_path(decoder, KEY).exists()
    machine.slowness = lambda _: 1.0
    later = LatencyTables(decoder, None, KEY, "none", when_busy=said.append)
    assert_quiet(later.table, machine)
    assert latency_path(decoder, KEY).exists()
    assert len(said) == 1


@pytest.mark.parametrize(("others", "threads", "kept"), [(0.4, 2, True), (1.4, 2, False), (1.4, 1, True)])
def test_a_machine_of_which_others_have_half_is_not_measured(
    others: float, threads: int, kept: bool, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first run is short there, and the next one is as well."""
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.others_during", lambda _: others)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    machine, said = StandInMachine(monkeypatch), list[str]()
    tables = LatencyTables(
        decoder, None, KEY, "none", before_measuring=lambda: said.append("measuring"), when_busy=said.append
    )
    assert_quiet(tables.table, machine)
    assert latency_path(decoder, KEY).exists() == kept
    if kept:
        assert said == ["measuring"]
    else:
        assert machine.time < 20.0
        assert "(other processes keep 1.4 of 2 processors busy)" in said[0]


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
    [kept] = tmp_path.rglob("light/*/*.json")
    assert set(json.loads(kept.read_text())) == {"8"}
