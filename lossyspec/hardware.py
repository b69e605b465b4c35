"""What this machine is: CPU, memory, GPUs, their canonical names and the precisions they can run.

Importing this module neither imports torch nor starts CUDA. A value that cannot be read is None plus a note.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from .cpu import CpuInfo, read_cpu, read_text_file
from .device_names import canonical_cpu_name, canonical_device_name
from .errors import EnvironmentProblem, LossyspecError, nearest
from .nvml import GpuInfo, nvml_session, read_gpus
from .settings import PRECISIONS, QUANTISED, Precision
from .versions import versions
from .visibility import resolve_visibility

#: the first torch whose GPU build multiplies int8 weights (pytorch pull request 159325)
_TORCH_INT8 = (2, 9)
FP8_ON_CPU = "fp8 products need an NVIDIA GPU of compute capability 8.9 or newer"


class HardwareInfo(BaseModel):
    """One machine. notes: problems with their fix. fingerprint: what must match for measurements to be comparable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    os: str
    python: str
    kernel: str
    cpu: CpuInfo
    gpus: list[GpuInfo]
    notes: list[str]
    fingerprint: dict[str, str | int | float | list[str] | None]


def detect_hardware(
    nvml: Any = None,
    environ: Mapping[str, str] | None = None,
    proc_root: str | Path = "/",
    torch_memory: Callable[[int], int | None] | None = None,
    torch_devices: Sequence[str] | None = None,
) -> HardwareInfo:
    """Look at this machine. Missing drivers or values become notes, not errors.

    nvml: stands in for pynvml. proc_root: folder that holds proc, sys and etc. torch_memory(cuda_index) -> total bytes.
    torch_devices: UUID or PCI bus id of each GPU as torch enumerates them (so after CUDA_VISIBLE_DEVICES).
    """
    notes: list[str] = []
    root = Path(proc_root)
    cpu = read_cpu(root, notes)
    gpus: list[GpuInfo] = []
    with nvml_session(nvml, notes) as session:
        if session is not None:
            gpus = read_gpus(session, notes, canonical_device_name)
    gpus = resolve_visibility(gpus, os.environ if environ is None else environ, torch_devices, notes)
    gpus = [_fill_memory(gpu, torch_memory, cpu.memory_bytes, notes) for gpu in gpus]
    release = re.search(r'^PRETTY_NAME="?([^"\n]+)', read_text_file(root / "etc/os-release", notes), re.MULTILINE)
    info = HardwareInfo(
        os=release[1] if release else platform.system(),
        python=platform.python_version(),
        kernel=platform.release(),
        cpu=cpu,
        gpus=gpus,
        notes=list(dict.fromkeys(notes)),
        fingerprint={},
    )
    return info.model_copy(update={"fingerprint": _fingerprint(info)})


def _fill_memory(
    gpu: GpuInfo, torch_memory: Callable[[int], int | None] | None, system_bytes: int | None, notes: list[str]
) -> GpuInfo:
    if gpu.memory_bytes is not None:
        return gpu
    total, source = None, "torch"
    if torch_memory is not None and gpu.cuda_index is not None:
        total = torch_memory(gpu.cuda_index) or None
    if total is None and gpu.unified:
        total, source = system_bytes, "meminfo"
    if gpu.unified:
        notes.append(
            f"{gpu.label}: it shares the CPU's memory, so NVML gives no total; "
            + (f"total taken from {source}" if total is not None else "its total is unknown")
        )
    return gpu.model_copy(update={"memory_bytes": total, "memory_source": source if total is not None else None})


def used_gpu(info: HardwareInfo) -> GpuInfo | None:
    """The GPU that would be used: the visible one with the lowest CUDA number; None for the CPU."""
    visible = [gpu for gpu in info.gpus if gpu.visible]
    return min(visible, key=lambda gpu: gpu.cuda_index or 0) if visible else None


def device_name(info: HardwareInfo) -> str:
    """Canonical name of the device that would be used."""
    gpu = used_gpu(info)
    return gpu.name if gpu else canonical_cpu_name(info.cpu.model, info.cpu.isa, info.cpu.usable_cores)


def _fingerprint(info: HardwareInfo) -> dict[str, Any]:
    gpu, cpu = used_gpu(info), info.cpu
    return {
        "device": device_name(info),
        "cpu": canonical_cpu_name(cpu.model, cpu.isa, cpu.usable_cores),
        "isa": list(cpu.isa),
        "usable_cores": cpu.usable_cores,
        "os": info.os,
        "kernel": info.kernel,
        "python": info.python,
        "device_memory_bytes": gpu.memory_bytes if gpu else cpu.memory_limit_bytes or cpu.memory_bytes,
        **{
            name: getattr(gpu, name) if gpu else None
            for name in ("compute_capability", "mig", "driver", "cuda_driver", "power_limit_w", "sm_clock_max_mhz")
        },
    }


def supported_precisions(info: HardwareInfo, torch_version: str | None = None) -> dict[Precision, str | None]:
    """For each precision: None when the device that would be used runs it, else the reason. torch_version: None for that
    of the torch that is installed."""
    torch_version = torch_version or versions().get("torch")
    reasons: dict[Precision, str | None] = dict.fromkeys(PRECISIONS)
    gpu = used_gpu(info)
    if gpu is None:
        reasons["fp8"] = FP8_ON_CPU
        if not {"avx2", "avx512"} & set(info.cpu.isa):
            packed = [name for name in QUANTISED if name != "fp8"]
            reasons.update(dict.fromkeys(packed, "torch has no fast kernel for packed weights on this CPU"))
        return reasons
    reasons.update({name: packed_problem(name, gpu.name, gpu.compute_capability, torch_version) for name in QUANTISED})
    if gpu.compute_capability is None:
        reasons["bf16"] = f"the compute capability of {gpu.name} could not be read, and bf16 needs 8.0 or newer"
    elif int(gpu.compute_capability.split(".")[0]) < 8:
        reasons["bf16"] = f"{gpu.name} has compute capability {gpu.compute_capability}, and bf16 needs 8.0 or newer"
    return reasons


def packed_problem(precision: str, gpu: str, capability: str | None, torch_version: str | None) -> str | None:
    """Why a GPU cannot run a quantised precision; None: it can. All but fp8 have their output rows in int8."""
    least = ".".join(map(str, _TORCH_INT8))
    if precision != "fp8" and torch_version is not None and _numbers(torch_version) < _TORCH_INT8:
        return f"torch {torch_version} multiplies int8 weights on CPUs only; on GPUs they need torch {least} or newer"
    if precision == "int8":
        return None
    kind, needed = ("fp8", (8, 9)) if precision == "fp8" else ("int4", (8, 0))
    least = ".".join(map(str, needed))
    if capability is None:
        return f"the compute capability of {gpu} could not be read, and {kind} needs {least} or newer"
    if _numbers(capability) < needed:
        return f"{gpu} has compute capability {capability}, and {kind} needs {least} or newer"
    return None


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def require_precision(info: HardwareInfo, precision: str) -> None:
    """Raise EnvironmentProblem when the device cannot run `precision`, LossyspecError when there is no such one."""
    reasons = supported_precisions(info)
    if precision not in reasons:
        raise LossyspecError(f"precision {precision!r} is not one of {', '.join(reasons)}." + nearest(precision, reasons))
    reason = reasons[precision]
    if reason is not None:
        usable = ", ".join(name for name, why in reasons.items() if why is None)
        raise EnvironmentProblem(f"{precision} cannot be used: {reason}; use one of: {usable}")


def render_lines(info: HardwareInfo) -> list[str]:
    """The machine as aligned "label: value" lines; n/a for what is not known."""
    cpu = info.cpu
    lines = [
        ("device used", device_name(info)),
        ("system", f"{info.os}, kernel {info.kernel}, Python {info.python}"),
        ("CPU", f"{_show(cpu.model)} ({cpu.arch})"),
        ("instruction sets", " ".join(cpu.isa) or "n/a"),
        (
            "cores",
            f"{cpu.usable_cores} usable, {_show(cpu.physical_cores)} physical, "
            f"{_show(cpu.logical_cores)} logical, {_show(cpu.sockets)} sockets",
        ),
        ("cgroup quota", _show(cpu.quota_cores, "cores")),
        ("memory", f"{_size(cpu.memory_bytes)} (cgroup limit {_size(cpu.memory_limit_bytes)})"),
    ]
    for gpu in info.gpus:
        lines += _gpu_lines(gpu)
    if not info.gpus:
        lines.append(("GPU", "none"))
    lines += [
        (f"precision {name}", "yes" if why is None else f"no: {why}") for name, why in supported_precisions(info).items()
    ]
    lines += [("note", note) for note in info.notes]
    width = max(len(label) for label, _ in lines) + 1
    return [f"{label + ':':<{width}} {value}" for label, value in lines]


def _gpu_lines(gpu: GpuInfo) -> list[tuple[str, str]]:
    seen = f"CUDA device {_show(gpu.cuda_index)}" if gpu.visible else "not visible to CUDA"
    source = gpu.memory_source or "n/a"
    others = (
        None
        if gpu.processes is None
        else ", ".join(f"pid {process.pid} ({_size(process.used_bytes)})" for process in gpu.processes) or "none"
    )
    reasons = None if gpu.throttle_reasons is None else ", ".join(gpu.throttle_reasons) or "none"
    return [
        (gpu.label, f"{gpu.name} ({_show(gpu.raw_name)}), {seen}"),
        ("  id", f"{_show(gpu.uuid)}, PCI {_show(gpu.pci_bus_id)}, MIG {_show(gpu.mig)}"),
        ("  memory", f"{_size(gpu.memory_bytes)} (from {source}{', unified' if gpu.unified else ''})"),
        (
            "  software",
            f"compute capability {_show(gpu.compute_capability)}, driver {_show(gpu.driver)}, CUDA {_show(gpu.cuda_driver)}",
        ),
        (
            "  power",
            f"{_show(gpu.power_draw_w, 'W')} (limit {_show(gpu.power_limit_w, 'W')}, energy counter "
            f"{'yes' if gpu.energy_counter else 'no'})",
        ),
        (
            "  clocks",
            f"SM {_show(gpu.sm_clock_mhz, 'MHz')} (max {_show(gpu.sm_clock_max_mhz, 'MHz')}), memory "
            f"{_show(gpu.memory_clock_mhz, 'MHz')}, temperature {_show(gpu.temperature_c, 'C')}",
        ),
        ("  throttling", _show(reasons)),
        ("  other processes", _show(others)),
    ]


def _show(value: str | float | None, unit: str = "") -> str:
    text = "n/a" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} {unit}" if unit and value is not None else text


def _size(value: int | None) -> str:
    return "n/a" if value is None else f"{value / 2**30:.1f} GiB"
