"""Joules of a run: NVML's energy counter of the GPU that is used, else RAPL's of the CPU, else none, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lossyspec.hardware import HardwareInfo, used_gpu

_RAPL = "sys/class/powercap"


@dataclass(frozen=True)
class EnergyMeter:
    """note: method and scope, or the reason why nothing is measured. counters: readers of joules so far, with the joules at
    which each starts over from 0 (None: never)."""

    note: dict[str, str]
    counters: tuple[tuple[Callable[[], float], float | None], ...] = ()

    def read(self) -> tuple[float, ...] | None:
        """All counters now; None without any, or when one cannot be read any more."""
        try:
            return tuple(counter() for counter, _ in self.counters) or None
        except (OSError, ValueError, RuntimeError):
            return None

    def since(self, before: Sequence[float] | None) -> float | None:
        """Joules since `before`, a result of `read`; None where it is not known."""
        now = self.read()
        if now is None or before is None:
            return None
        spent = 0.0
        for first, last, (_, span) in zip(before, now, self.counters, strict=True):
            if last < first and span is None:
                return None
            spent += last - first + (span or 0.0) * (last < first)
        return spent


def find_energy_meter(hardware: HardwareInfo, nvml: Any = None, root: Path = Path("/")) -> EnergyMeter:
    """The meter of the device that is used. nvml: the started pynvml module, needed for a GPU."""
    gpu = used_gpu(hardware)
    if gpu is not None:
        return _gpu_meter(gpu, nvml)
    zones = sorted(zone for zone in (root / _RAPL).glob("intel-rapl:*") if zone.name.count(":") == 1)
    readable = [zone for zone in zones if _joules(zone, "energy_uj") is not None]
    if not zones:
        return EnergyMeter({"reason": "this CPU shows no RAPL counters here (a virtual machine hides them)"})
    if len(readable) < len(zones):
        return EnergyMeter({"reason": f"RAPL's counters cannot be read by this user: {zones[0]}/energy_uj"})
    counters = tuple((_reader(zone), _joules(zone, "max_energy_range_uj")) for zone in zones)
    return EnergyMeter({"method": "RAPL", "scope": f"{len(zones)} CPU packages, whoever uses them"}, counters)


def _gpu_meter(gpu: Any, nvml: Any) -> EnergyMeter:
    if nvml is None or not gpu.energy_counter or gpu.uuid is None:
        return EnergyMeter({"reason": f"{gpu.name} has no energy counter that can be read"})
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)

    def joules() -> float:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

    return EnergyMeter(
        {"method": "NVML energy counter", "scope": f"the whole of {gpu.name}, whoever uses it"}, ((joules, None),)
    )


def _reader(zone: Path) -> Callable[[], float]:
    return lambda: int((zone / "energy_uj").read_text()) / 1e6


def _joules(zone: Path, name: str) -> float | None:
    try:
        return int((zone / name).read_text()) / 1e6
    except (OSError, ValueError):
        return None
