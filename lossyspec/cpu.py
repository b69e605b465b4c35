"""The CPU and memory that this process may use, from /proc, its affinity and its cgroup."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

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
#: instructions that multiply bf16 at about twice the rate of fp32; without them it is emulated, at a part of it
_BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
_ARM_PARTS = {
    0xD0C: "Neoverse-N1",
    0xD40: "Neoverse-V1",
    0xD49: "Neoverse-N2",
    0xD4F: "Neoverse-V2",
    0xD85: "Cortex-X925",
    0xD87: "Cortex-A725",
}


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


@lru_cache(maxsize=8)
def multiplies_bf16(root: Path = Path("/")) -> bool:
    """Whether the CPU has units for bf16 products."""
    return not _BF16_UNITS.isdisjoint(read_cpu(root, []).isa)


def read_text_file(path: Path, notes: list[str]) -> str:
    """Text of a file; empty when there is none (usual for optional ones), with a note when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        notes.append(f"cannot read {path}: {error.strerror}; check its permissions")
        return ""


def instruction_sets(root: Path = Path("/")) -> list[str]:
    """All that the kernel names of an x86 CPU, in order of the alphabet."""
    found = re.search(r"^flags\s*:(.*)$", read_text_file(root / "proc/cpuinfo", []), re.MULTILINE)
    return sorted(found[1].split()) if found else []


def read_cpu(root: Path, notes: list[str]) -> CpuInfo:
    """Reads the CPU under `root`; what cannot be read is None, with a note."""
    text = read_text_file(root / "proc/cpuinfo", notes)
    if not text:
        notes.append("no /proc/cpuinfo: the CPU's instruction sets are unknown; mount /proc or use Linux")
    fields: dict[str, str] = {}
    for key, value in re.findall(r"^([^:\n]+?)[ \t]*:[ \t]*(.*)$", text, re.MULTILINE):
        fields.setdefault(key, value)
    x86, arm = fields.get("flags", "").split(), fields.get("Features", "").split()
    logical = len(re.findall(r"^processor\s*:", text, re.MULTILINE)) or os.cpu_count()
    sockets, physical = _topology(root, text, notes)
    quota, limit = _cgroup_limits(root, notes)
    total = re.search(r"^MemTotal:\s*(\d+) kB", read_text_file(root / "proc/meminfo", notes), re.MULTILINE)
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
        (read_text_file(folder / "physical_package_id", notes).strip(), read_text_file(folder / "core_id", notes).strip())
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
    allowed = re.search(r"^Cpus_allowed_list:\s*([\d,-]+)", read_text_file(root / "proc/self/status", notes), re.MULTILINE)
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
        words = read_text_file(folder / "cpu.max", notes).split() or [
            read_text_file(folder / f"cpu.cfs_{name}_us", notes).strip() for name in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdigit() and int(word) > 0 for word in words):  # not "max", not -1
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _cgroup_folders(root, "memory", notes):
        word = (
            read_text_file(folder / "memory.max", notes) or read_text_file(folder / "memory.limit_in_bytes", notes)
        ).strip()
        if word.isdigit() and int(word) < 2**62:  # v1 says "no limit" with a number near 2**63
            limits.append(int(word))
    return min(quotas, default=None), min(limits, default=None)


def _cgroup_folders(root: Path, controller: str, notes: list[str]) -> list[Path]:
    """Folders of this process's cgroup and its ancestors; a container sees its own at the top."""
    folders: list[Path] = []
    for _, names, path in re.findall(
        r"^(\d+):([^:]*):(.*)$", read_text_file(root / "proc/self/cgroup", notes), re.MULTILINE
    ):
        if names and controller not in names.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for top in dict.fromkeys((names, controller) if names else ("", "unified")):
            folders += [(root / "sys/fs/cgroup" / top).joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", read_text_file(root / "proc/meminfo", []), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def peak_memory_bytes() -> int:
    """Most memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
