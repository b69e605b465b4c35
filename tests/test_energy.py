"""Joules of a run: RAPL by files, NVML by a stand-in, and the reason where there are none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lossyspec.tuner.measurement.energy as energy
from lossyspec.tuner.measurement.energy import EnergyMeter, find_energy_meter

CPU_ONLY: Any = SimpleNamespace(gpus=[])


def zone(root: Path, name: str, microjoules: int, span: int = 1_000_000_000) -> Path:
    folder = root / "sys/class/powercap" / name
    folder.mkdir(parents=True)
    (folder / "energy_uj").write_text(str(microjoules))
    (folder / "max_energy_range_uj").write_text(str(span))
    return folder


def test_rapl_sums_the_packages_and_knows_when_a_counter_starts_over(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "intel-rapl:0", 5_000_000), zone(tmp_path, "intel-rapl:1", 999_000_000)
    zone(tmp_path, "intel-rapl:0:0", 77)  # a part of the first: not counted twice
    meter = find_energy_meter(CPU_ONLY, root=tmp_path)
    assert meter.note == {"method": "RAPL", "scope": "2 CPU packages, whoever uses them"}
    before = meter.read()
    assert before == (5.0, 999.0)
    (first / "energy_uj").write_text("8500000")
    (second / "energy_uj").write_text("500000")
    assert meter.since(before) == pytest.approx(3.5 + 1.5)
    (first / "energy_uj").unlink()
    assert meter.since(before) is None


def test_without_counters_the_reason_is_said_and_nothing_is_measured(tmp_path: Path) -> None:
    bare = find_energy_meter(CPU_ONLY, root=tmp_path)
    assert "no RAPL counters" in bare.note["reason"]
    assert bare.read() is None and bare.since(bare.read()) is None
    (zone(tmp_path, "intel-rapl:0", 1) / "energy_uj").unlink()
    assert "cannot be read" in find_energy_meter(CPU_ONLY, root=tmp_path).note["reason"]


def test_a_gpus_counter_is_in_millijoules_and_belongs_to_the_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="h100", uuid="GPU-1", energy_counter=True)
    monkeypatch.setattr(energy, "used_gpu", lambda hardware: gpu)
    readings = iter([1000, 3500, 2000])
    nvml = SimpleNamespace(
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(readings) if handle == "handle of GPU-1" else None,
    )
    meter = find_energy_meter(CPU_ONLY, nvml)
    assert meter.note["method"] == "NVML energy counter"
    before = meter.read()
    assert meter.since(before) == pytest.approx(2.5)
    assert meter.since((9.0,)) is None  # a counter without a known end that falls has been reset
    gpu.energy_counter = False
    assert find_energy_meter(CPU_ONLY, nvml).note == {"reason": "h100 has no energy counter that can be read"}
    assert find_energy_meter(CPU_ONLY, None).counters == ()


def test_a_meter_without_counters_is_absent_not_zero() -> None:
    assert EnergyMeter({"reason": "none"}).since(()) is None
