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

from .errors import EnvironmentProblem, LossyspecError, nearest
from .nvml import MIG_ENABLED, GpuInfo, GpuProcess, nvml_session, read_gpus, resolve_visibility
from .settings import Precision

__all__ = [
    "MIG_ENABLED",
    "CpuInfo",
    "GpuInfo",
    "GpuProcess",
    "HardwareInfo",
    "canonical_cpu_name",
    "canonical_device_name",
    "detect_hardware",
    "device_name",
    "render_lines",
    "require_precision",
    "supported_precisions",
    "used_gpu",
]

_ISA_X86 = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
_ISA_ARM = {"asimd": "neon", "sve": "sve", "bf16": "bf16", "i8mm": "i8mm"}  # cpuinfo's word: ours
_ISA_NAME = {
    "amx_bf16": "amxbf16",
    "avx512_bf16": "avx512bf16",
    "avx512f": "avx512",
    "avx2": "avx2",
    "avx": "avx",
    "sse4_2": "sse42",
    "sve": "sve",
    "neon": "neon",
}  # best first
_ARM_PARTS = {
    0xD0C: "Neoverse-N1",
    0xD40: "Neoverse-V1",
    0xD49: "Neoverse-N2",
    0xD4F: "Neoverse-V2",
    0xD85: "Cortex-X925",
    0xD87: "Cortex-A725",
}
# Sold memory in GB by model (NVML reports a little less). "form/": the form when the name gives none. The first size
# is assumed when neither the name nor NVML says, save after "?": there no size is the usual one.
_MEMORY_GB = """
h100 sxm/80,96,64; h100-pcie 80; h100-nvl 94; h200 sxm/141; h200-nvl 141; h800 sxm/80; h800-pcie 80; h20 sxm/?96,141;
gh200 ?96,144; b200 sxm/180; a100 ?40,80; a800 ?40,80; v100 ?16,32; v100s-pcie 32; p100 ?16,12; p40 24; p4 8; t4 16;
t4g 16; l4 24; l20 48; l40 48; l40s 48; a2 16; a10 24; a10g 24; a16 16; a30 24; a40 48; rtx-a2000 ?6,12; rtx-a4000 16;
rtx-a4500 20; rtx-a5000 24; rtx-a6000 48; rtx-2000-ada 16; rtx-4000-ada 20; rtx-4000-sff-ada 20; rtx-4500-ada 24;
rtx-5000-ada 32; rtx-6000-ada 48; rtx-pro-6000-blackwell 96; rtx-pro-6000-blackwell-server 96;
rtx-pro-6000-blackwell-workstation 96; rtx-pro-6000-blackwell-max-q-workstation 96; rtx-pro-5000-blackwell ?48,72;
rtx-pro-4500-blackwell 32; rtx-pro-4000-blackwell 24; quadro-rtx-5000 16; quadro-rtx-6000 24; quadro-rtx-8000 48;
titan-rtx 24; gtx-1080-ti 11; rtx-2060 ?6,12; rtx-2070 8; rtx-2080 8; rtx-2080-super 8; rtx-2080-ti 11; rtx-3050 ?8,6;
rtx-3060 ?12,8; rtx-3060-ti 8; rtx-3070 8; rtx-3070-ti 8; rtx-3080 ?10,12; rtx-3080-ti 12; rtx-3090 24; rtx-3090-ti 24;
rtx-4060 8; rtx-4060-ti ?8,16; rtx-4070 12; rtx-4070-super 12; rtx-4070-ti 12; rtx-4070-ti-super 16; rtx-4080 16;
rtx-4080-super 16; rtx-4090 24; rtx-4090-d 24; rtx-5060 8; rtx-5060-ti ?8,16; rtx-5070 12; rtx-5070-ti 16; rtx-5080 16;
rtx-5090 32; rtx-5090-d 32; rtx-4080-laptop 12; rtx-4090-laptop 16; rtx-5080-laptop 16; rtx-5090-laptop 24
"""
_MODELS = {key: value.rpartition("/") for key, value in (entry.split() for entry in _MEMORY_GB.split(";"))}


class CpuInfo(BaseModel):
    """The CPU and memory. usable_cores: cores the process may keep busy, from its affinity and its cgroup quota
    (rounded down, at least 1). quota_cores and memory_limit_bytes: the cgroup's limits, None when there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None
    arch: str
    isa: list[str]
    sockets: int | None
    physical_cores: int | None
    logical_cores: int | None
    usable_cores: int
    quota_cores: float | None
    memory_bytes: int | None
    memory_limit_bytes: int | None


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
    cpu = _read_cpu(root, notes)
    gpus: list[GpuInfo] = []
    with nvml_session(nvml, notes) as session:
        if session is not None:
            gpus = read_gpus(session, notes, canonical_device_name)
    gpus = resolve_visibility(gpus, os.environ if environ is None else environ, torch_devices, notes)
    gpus = [_fill_memory(gpu, torch_memory, cpu.memory_bytes, notes) for gpu in gpus]
    release = re.search(r'^PRETTY_NAME="?([^"\n]+)', _read(root / "etc/os-release", notes), re.MULTILINE)
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


def canonical_device_name(raw: str, memory_bytes: int | None = None) -> str:
    """One name per GPU model, such as "h100-sxm-80gb"; a clean slug for an unknown one.

    memory_bytes: total memory of the whole GPU, which decides where the name leaves the size open.
    """
    text = re.sub(r"\b(nvidia|geforce|tesla|generation|edition|gpu)\b", " ", raw.lower())
    text, _, profile = re.sub(r"\bmig[\s-]+", "\0", text).partition("\0")
    named = re.search(r"\b(\d+)\s?gb?\b", text)
    hbm2e = "hbm2e" in text
    form = re.search(r"\b(sxm|pcie|nvl)\d?\b", text)
    key = _slug(re.sub(r"\b(sxm\d?|pcie|nvl|hbm\d\w?|\d+\s?gb?)\b", " ", text)) or "unknown"
    kind = form[1] if form else "pcie" if key == "h100" and hbm2e else ""
    default, _, sizes = _MODELS.get(f"{key}-{kind}") or _MODELS.get(key) or ("", "", "")
    if named and not (key == "gh200" and int(named[1]) not in (96, 144)):  # "GH200 480GB" names the CPU's memory
        size: int | None = int(named[1])
    else:
        size = _memory_gb(sizes, memory_bytes)
    parts = [key, kind or default, f"{size}gb" if size else "", f"mig-{_slug(profile)}" if profile.strip() else ""]
    return "-".join(part for part in parts if part)


def _memory_gb(sizes: str, memory_bytes: int | None) -> int | None:
    """Sold size in GB: the nearest of `sizes` within 8 % (ECC and firmware keep up to that), else as reported."""
    sold = [int(size) for size in sizes.strip("?").split(",") if size]
    if not sold or memory_bytes is None:
        return None if not sold or sizes.startswith("?") else sold[0]
    size_gb = memory_bytes / 2**30
    close = min(sold, key=lambda size: abs(size - size_gb))
    return close if abs(close - size_gb) <= 0.08 * close else round(size_gb)


def canonical_cpu_name(model: str | None, isa: Sequence[str], cores: int) -> str:
    """Name of a CPU as a device, such as "cpu-intel-xeon-avx512bf16-2c": model, best instruction set, usable cores."""
    text = re.sub(r"\((r|tm|c)\)", " ", (model or "unknown").lower())
    text = re.sub(r"@.*|\bcpu\b|\bprocessor\b|\b\d+-core\b", " ", text)
    best = next((name for flag, name in _ISA_NAME.items() if flag in isa), "")
    if best in ("sve", "neon") and "bf16" in isa:
        best += "bf16"
    return "-".join(part for part in ("cpu", _slug(text) or "unknown", best, f"{cores}c") if part)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


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


def supported_precisions(info: HardwareInfo) -> dict[Precision, str | None]:
    """For "fp32", "bf16" and "fp16": None when the device that would be used runs it, else the reason."""
    reasons: dict[Precision, str | None] = {"fp32": None, "bf16": None, "fp16": None}
    gpu = used_gpu(info)
    if gpu is None:
        return reasons
    if gpu.compute_capability is None:
        reasons["bf16"] = f"the compute capability of {gpu.name} could not be read, and bf16 needs 8.0 or newer"
    elif int(gpu.compute_capability.split(".")[0]) < 8:
        reasons["bf16"] = f"{gpu.name} has compute capability {gpu.compute_capability}, and bf16 needs 8.0 or newer"
    return reasons


def require_precision(info: HardwareInfo, precision: str) -> None:
    """Raise EnvironmentProblem when the device cannot run `precision`, LossyspecError when there is no such one."""
    reasons = supported_precisions(info)
    if precision not in reasons:
        raise LossyspecError(f"precision {precision!r} is not one of {', '.join(reasons)}." + nearest(precision, reasons))
    reason = reasons[precision]
    if reason is not None:
        usable = ", ".join(name for name, why in reasons.items() if why is None)
        raise EnvironmentProblem(f"{precision} cannot be used: {reason}; use one of: {usable}")


def _read(path: Path, notes: list[str]) -> str:
    """Text of a file; empty when there is none (usual for optional ones), with a note when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        notes.append(f"cannot read {path}: {error.strerror}; check its permissions")
        return ""


def _read_cpu(root: Path, notes: list[str]) -> CpuInfo:
    text = _read(root / "proc/cpuinfo", notes)
    if not text:
        notes.append("no /proc/cpuinfo: the CPU's instruction sets are unknown; mount /proc or use Linux")
    fields: dict[str, str] = {}
    for key, value in re.findall(r"^([^:\n]+?)[ \t]*:[ \t]*(.*)$", text, re.MULTILINE):
        fields.setdefault(key, value)
    x86, arm = fields.get("flags", "").split(), fields.get("Features", "").split()
    logical = len(re.findall(r"^processor\s*:", text, re.MULTILINE)) or os.cpu_count()
    sockets, physical = _topology(root, text, notes)
    quota, limit = _cgroup_limits(root, notes)
    total = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo", notes), re.MULTILINE)
    if not total:
        notes.append("no MemTotal in /proc/meminfo: the memory size is unknown; mount /proc or use Linux")
    return CpuInfo(
        model=fields.get("model name") or _arm_model(text) or fields.get("Model") or platform.processor() or None,
        arch=platform.machine(),
        sockets=sockets,
        physical_cores=physical,
        logical_cores=logical,
        isa=[flag for flag in _ISA_X86 if flag in x86] + [ours for word, ours in _ISA_ARM.items() if word in arm],
        usable_cores=_usable_cores(root, logical, quota, notes),
        quota_cores=quota,
        memory_bytes=int(total[1]) * 1024 if total else None,
        memory_limit_bytes=limit,
    )


def _arm_model(cpuinfo: str) -> str | None:
    parts = dict.fromkeys(re.findall(r"^CPU part\s*:\s*0x([0-9a-f]+)", cpuinfo, re.MULTILINE))
    return "+".join(_ARM_PARTS.get(int(part, 16), f"ARM-part-0x{part}") for part in parts) or None


def _topology(root: Path, cpuinfo: str, notes: list[str]) -> tuple[int | None, int | None]:
    """(sockets, physical cores) from sysfs, or from cpuinfo where sysfs is hidden; None when neither says."""
    folders = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology"))
    pairs = {
        (_read(folder / "physical_package_id", notes).strip(), _read(folder / "core_id", notes).strip())
        for folder in folders
    }
    pairs = {pair for pair in pairs if all(pair)} or set(
        zip(
            re.findall(r"^physical id\s*:\s*(\d+)", cpuinfo, re.MULTILINE),
            re.findall(r"^core id\s*:\s*(\d+)", cpuinfo, re.MULTILINE),
            strict=False,
        )
    )
    if not pairs:
        notes.append("neither /sys nor /proc/cpuinfo gives the CPU's topology: sockets and cores are unknown")
    return (len({package for package, _ in pairs}), len(pairs)) if pairs else (None, None)


def _usable_cores(root: Path, logical: int | None, quota: float | None, notes: list[str]) -> int:
    allowed = re.search(r"^Cpus_allowed_list:\s*([\d,-]+)", _read(root / "proc/self/status", notes), re.MULTILINE)
    cores = logical or 1
    if allowed:
        ranges = [span.partition("-") for span in allowed[1].split(",")]
        cores = min(cores, sum(int(last or first) - int(first) + 1 for first, _, last in ranges))
    return max(1, min(cores, int(quota))) if quota is not None else cores


def _cgroup_limits(root: Path, notes: list[str]) -> tuple[float | None, int | None]:
    """(CPU quota in cores, memory limit in bytes): tightest of the process's cgroup and its ancestors, v2 or v1."""
    quotas: list[float] = []
    limits: list[int] = []
    for folder in _cgroup_folders(root, "cpu", notes):
        words = _read(folder / "cpu.max", notes).split() or [
            _read(folder / f"cpu.cfs_{name}_us", notes).strip() for name in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdigit() and int(word) > 0 for word in words):  # not "max", not -1
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _cgroup_folders(root, "memory", notes):
        word = (_read(folder / "memory.max", notes) or _read(folder / "memory.limit_in_bytes", notes)).strip()
        if word.isdigit() and int(word) < 2**62:  # v1 says "no limit" with a number near 2**63
            limits.append(int(word))
    return min(quotas, default=None), min(limits, default=None)


def _cgroup_folders(root: Path, controller: str, notes: list[str]) -> list[Path]:
    """Folders of this process's cgroup and its ancestors; a container sees its own at the top."""
    folders: list[Path] = []
    for _, names, path in re.findall(r"^(\d+):([^:]*):(.*)$", _read(root / "proc/self/cgroup", notes), re.MULTILINE):
        if names and controller not in names.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for top in dict.fromkeys((names, controller) if names else ("", "unified")):
            folders += [(root / "sys/fs/cgroup" / top).joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


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
