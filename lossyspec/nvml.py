"""GPUs as NVML reports them. A value that cannot be read is None plus a note."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MIG_ENABLED = "enabled"  # `mig` of a whole GPU that is split into slices: CUDA cannot use it as such
_CLOCK_SM, _CLOCK_MEMORY, _SENSOR_GPU = 1, 2, 0  # NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU
_ABSENT = (2**32 - 1, 2**64 - 1)  # NVML_VALUE_NOT_AVAILABLE as uint and as ulonglong
_THROTTLE = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
    "board_limit",
    "reliability",
)  # bit 0 first, as nvmlClocksThrottleReason* number them
_INIT_FIX = {
    "LibraryNotFound": "no NVIDIA driver library (libnvidia-ml.so.1): only the CPU is used; to use a GPU install the "
    "NVIDIA driver, or start the container with --gpus all",
    "DriverNotLoaded": "the NVIDIA driver is not loaded: only the CPU is used; run 'nvidia-smi', then "
    "'modprobe nvidia' or reboot",
    "LibRmVersionMismatch": "the NVIDIA driver and its library differ in version: only the CPU is used; reboot",
    "NoPermission": "no permission to use NVML: only the CPU is used; give this user access to /dev/nvidia*",
}


class GpuProcess(BaseModel):
    """Another process on a GPU. used_bytes: GPU memory in bytes (None where the driver does not say)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    used_bytes: int | None


class GpuInfo(BaseModel):
    """A GPU or a MIG slice. Units are in the names; None is "not reported", never 0.

    index: NVML number (a slice has its GPU's). mig: a slice's profile ("1g.10gb"; "unknown" if it cannot be told),
    "enabled" for the GPU that is split. Clocks, temperature, throttle reasons and the power limit of a slice are its
    GPU's; draw and energy cannot be told apart and are None and False. cuda_index: None when not visible or ambiguous.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int
    uuid: str | None
    pci_bus_id: str | None
    name: str
    raw_name: str | None
    memory_bytes: int | None
    memory_source: Literal["nvml", "torch", "meminfo"] | None
    unified: bool
    compute_capability: str | None
    driver: str | None
    cuda_driver: str | None
    power_limit_w: float | None
    power_draw_w: float | None
    sm_clock_mhz: int | None
    sm_clock_max_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    throttle_reasons: list[str] | None
    mig: str | None = None
    mig_parent_uuid: str | None = None
    visible: bool = False
    cuda_index: int | None = None
    processes: list[GpuProcess] | None
    energy_counter: bool

    @property
    def label(self) -> str:
        """Short text for notes, such as "GPU 0" or "GPU 0 MIG 1g.10gb"."""
        return f"GPU {self.index}" + (f" MIG {self.mig}" if self.is_slice else "")

    @property
    def is_slice(self) -> bool:
        """Whether this is a MIG slice, not a whole GPU."""
        return self.mig not in (None, MIG_ENABLED)


class _Reader:
    """Calls NVML; a failed call gives None, and `report` turns the failures into one note per device and cause."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.errors = _error_types(nvml)
        self.last_error = ""
        self._failures: dict[tuple[str, str], list[str]] = {}

    def read(self, who: str, field: str, names: Sequence[str], *args: Any, expected: tuple[str, ...] = ()) -> Any:
        """First of the functions `names` that exists, called; None on an error (no note if `expected` has its kind)."""
        why, self.last_error = f"this pynvml lacks {names[0]}", "FunctionNotFound"
        for function in filter(None, (getattr(self.nvml, name, None) for name in names)):
            try:
                return function(*args)
            except self.errors as error:
                why, self.last_error = str(error), _kind(error)
                if self.last_error not in ("FunctionNotFound", "NVMLLibraryMismatchError"):
                    break
        if self.last_error not in expected:
            self.fail(who, field, why)
        return None

    def fail(self, who: str, field: str, why: str) -> None:
        """Remember that `field` of `who` is absent."""
        fields = self._failures.setdefault((who, why), [])
        if field not in fields:
            fields.append(field)

    def number(self, who: str, field: str, names: Sequence[str], *args: Any, scale: float = 1.0) -> float | None:
        """A positive quantity divided by `scale`; NVML's 0 and "not available" count as absent."""
        value = self.read(who, field, names, *args)
        if value is None:
            return None
        if value <= 0 or value in _ABSENT:
            self.fail(who, field, f"NVML gave {value}, which means no value")
            return None
        return float(value / scale)

    def whole(self, who: str, field: str, names: Sequence[str], *args: Any) -> int | None:
        """`number` as an int."""
        value = self.number(who, field, names, *args)
        return None if value is None else int(value)

    def text(self, who: str, field: str, names: Sequence[str], *args: Any) -> str | None:
        """A string, also where the bindings give bytes."""
        return _text(self.read(who, field, names, *args))

    def report(self) -> list[str]:
        """One note per device and cause."""
        return [f"{who}: not read ({why}): {', '.join(fields)}" for (who, why), fields in self._failures.items()]


def _error_types(nvml: Any) -> tuple[type[Exception], ...]:
    names = ("NVMLError", "NVMLLibraryMismatchError")
    found = [getattr(nvml, name, None) for name in names]
    if found[0] is None:  # a stand-in that raises the real exceptions
        try:
            real = importlib.import_module("pynvml")
        except ImportError:
            return ()
        found = [getattr(real, name, None) for name in names]
    return tuple(error for error in found if isinstance(error, type) and issubclass(error, Exception))


def _kind(error: Exception) -> str:
    return type(error).__name__.removeprefix("NVMLError_")


def _text(value: Any) -> str | None:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return str(text).strip("\0 ") or None if text is not None else None


@contextmanager
def nvml_session(nvml: Any, notes: list[str]) -> Iterator[Any | None]:
    """NVML started, and shut down on leaving; gives None, with the fix in `notes`, where there is none to use."""
    module = _load(notes) if nvml is None else nvml
    if module is not None and not callable(getattr(module, "nvmlInit", None)):
        notes.append("wrong pynvml package (it has no nvmlInit): pip uninstall pynvml; pip install nvidia-ml-py")
        module = None
    started = module is not None and _start(module, notes)
    try:
        yield module if started else None
    finally:
        if started:
            reader = _Reader(module)
            reader.read("NVML", "shutdown", ("nvmlShutdown",))
            notes.extend(reader.report())


def _load(notes: list[str]) -> Any | None:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        notes.append("the NVML bindings are missing: only the CPU is used; pip install nvidia-ml-py")
        return None


def _start(nvml: Any, notes: list[str]) -> bool:
    try:
        nvml.nvmlInit()
    except _error_types(nvml) as error:
        default = f"NVML did not start ({error}): only the CPU is used; run 'nvidia-smi' to see why"
        notes.append(_INIT_FIX.get(_kind(error), default))
        return False
    return True


def read_gpus(nvml: Any, notes: list[str], name_of: Callable[[str, int | None], str]) -> list[GpuInfo]:
    """Every GPU, each followed by its MIG slices. `name_of(raw_name, memory_bytes)` gives the canonical name."""
    reader, gpus = _Reader(nvml), list[GpuInfo]()
    driver = reader.text("NVML", "driver", ("nvmlSystemGetDriverVersion",))
    cuda = reader.whole("NVML", "cuda_driver", ("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2"))
    system = {"driver": driver, "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"}
    count = reader.read("NVML", "device count", ("nvmlDeviceGetCount",))
    if count == 0:
        notes.append("the NVIDIA driver reports no GPU: only the CPU is used; run 'nvidia-smi -L' to check")
    for index in range(count or 0):
        handle = reader.read(f"GPU {index}", "the whole GPU", ("nvmlDeviceGetHandleByIndex",), index)
        if handle is not None:
            gpu = _read_gpu(reader, index, handle, system, name_of)
            gpus += [gpu, *_read_slices(reader, gpu, handle, notes, name_of)]
    notes.extend(reader.report())
    return gpus


def _read_gpu(
    reader: _Reader, index: int, handle: Any, system: dict[str, Any], name_of: Callable[[str, int | None], str]
) -> GpuInfo:
    who = f"GPU {index}"
    raw = reader.text(who, "raw_name", ("nvmlDeviceGetName",), handle)
    memory, unified = _memory(reader, who, handle)
    pci = reader.read(who, "pci_bus_id", ("nvmlDeviceGetPciInfo",), handle)
    capability = reader.read(who, "compute_capability", ("nvmlDeviceGetCudaComputeCapability",), handle)
    mode = reader.read(who, "mig", ("nvmlDeviceGetMigMode",), handle, expected=("NotSupported", "FunctionNotFound"))
    power = {
        "power_limit_w": ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit"),
        "power_draw_w": ("nvmlDeviceGetPowerUsage",),
    }
    clocks = {
        "sm_clock_mhz": ("nvmlDeviceGetClockInfo", _CLOCK_SM),
        "sm_clock_max_mhz": ("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
        "memory_clock_mhz": ("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
    }
    fields: dict[str, Any] = {}
    fields |= {name: reader.number(who, name, calls, handle, scale=1000) for name, calls in power.items()}
    fields |= {name: reader.whole(who, name, (call,), handle, kind) for name, (call, kind) in clocks.items()}
    return GpuInfo(
        index=index,
        raw_name=raw,
        name=name_of(raw or "unknown", memory),
        uuid=reader.text(who, "uuid", ("nvmlDeviceGetUUID",), handle),
        pci_bus_id=None if pci is None else _text(pci.busId),
        memory_bytes=memory,
        memory_source=None if memory is None else "nvml",
        unified=unified,
        compute_capability=None if capability is None else "{}.{}".format(*capability),
        temperature_c=reader.read(
            who, "temperature_c", ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"), handle, _SENSOR_GPU
        ),
        throttle_reasons=_throttle_reasons(reader, who, handle),
        processes=_processes(reader, who, handle),
        energy_counter=reader.read(who, "energy_counter", ("nvmlDeviceGetTotalEnergyConsumption",), handle) is not None,
        mig=MIG_ENABLED if mode is not None and mode[0] == 1 else None,
        **fields,
        **system,
    )


def _memory(reader: _Reader, who: str, handle: Any) -> tuple[int | None, bool]:
    """(total bytes, unified): a GPU that shares the system's memory has no total of its own to report."""
    info = reader.read(who, "memory_bytes", ("nvmlDeviceGetMemoryInfo",), handle, expected=("NotSupported",))
    if info is None:
        return None, reader.last_error == "NotSupported"
    total = int(info.total)
    return (None, True) if total == 0 or total in _ABSENT else (total, False)


def _throttle_reasons(reader: _Reader, who: str, handle: Any) -> list[str] | None:
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    bits = reader.read(who, "throttle_reasons", names, handle)
    if bits is None:
        return None
    known = [name for bit, name in enumerate(_THROTTLE) if bits >> bit & 1]
    rest = bits >> len(_THROTTLE) << len(_THROTTLE)
    return known + ([f"unknown_{rest:#x}"] if rest else [])


def _processes(reader: _Reader, who: str, handle: Any) -> list[GpuProcess] | None:
    names = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2")
    found = reader.read(who, "processes", names, handle)
    if found is None:
        return None
    return [
        GpuProcess(pid=p.pid, used_bytes=None if p.usedGpuMemory in (None, *_ABSENT) else p.usedGpuMemory)
        for p in found
        if p.pid != os.getpid()
    ]


def _read_slices(
    reader: _Reader, gpu: GpuInfo, parent: Any, notes: list[str], name_of: Callable[[str, int | None], str]
) -> list[GpuInfo]:
    slices: list[GpuInfo] = []
    if gpu.mig != MIG_ENABLED:
        return slices
    for number in range(reader.read(gpu.label, "MIG slices", ("nvmlDeviceGetMaxMigDeviceCount",), parent) or 0):
        handle = reader.read(
            gpu.label,
            "MIG slices",
            ("nvmlDeviceGetMigDeviceHandleByIndex",),
            parent,
            number,
            expected=("NotFound", "InvalidArgument"),
        )  # an empty place
        if handle is not None:
            slices.append(_read_slice(reader, gpu, handle, number, name_of))
    if not slices:
        notes.append(
            f"{gpu.label}: MIG is enabled without a slice, so CUDA cannot use it; create one with "
            "'nvidia-smi mig -cgi <profile> -C' or disable it with 'nvidia-smi -mig 0'"
        )
    return slices


def _read_slice(
    reader: _Reader, gpu: GpuInfo, handle: Any, number: int, name_of: Callable[[str, int | None], str]
) -> GpuInfo:
    who = f"{gpu.label} MIG slice {number}"
    raw = reader.text(who, "raw_name", ("nvmlDeviceGetName",), handle)
    parts = reader.read(who, "attributes", ("nvmlDeviceGetAttributes_v2", "nvmlDeviceGetAttributes"), handle)
    memory, _ = _memory(reader, who, handle)
    if memory is None and parts is not None and parts.memorySizeMB:
        memory = int(parts.memorySizeMB) * 2**20
    named = re.search(r"MIG\s+(\S+)", raw or "")
    profile = named.group(1) if named else _profile(parts, gpu.memory_bytes)
    if profile is None:
        reader.fail(who, "mig", "neither its name nor its attributes give the profile")
    return gpu.model_copy(
        update={
            "uuid": reader.text(who, "uuid", ("nvmlDeviceGetUUID",), handle),
            "raw_name": raw,
            "name": name_of(f"{gpu.raw_name or 'unknown'} MIG {profile or 'unknown'}", gpu.memory_bytes),
            "memory_bytes": memory,
            "memory_source": None if memory is None else "nvml",
            "unified": False,
            "mig": profile or "unknown",
            "mig_parent_uuid": gpu.uuid,
            "power_draw_w": None,
            "energy_counter": False,
            "processes": _processes(reader, who, handle),
        }
    )


def _profile(parts: Any, gpu_memory_bytes: int | None) -> str | None:
    """Profile such as "1g.10gb" from slice counts and memory, rounded to eighths of the GPU as nvidia-smi names it."""
    if parts is None or not parts.gpuInstanceSliceCount or not parts.memorySizeMB:
        return None
    size_gb = math.ceil(parts.memorySizeMB / 1024)
    if gpu_memory_bytes:
        eighths = math.ceil(parts.memorySizeMB * 2**20 / gpu_memory_bytes * 8)
        size_gb = math.floor(eighths / 8 * math.ceil(gpu_memory_bytes / 2**30) + 0.5)
    whole, part = parts.gpuInstanceSliceCount, parts.computeInstanceSliceCount
    return (f"{part}c." if 0 < part < whole else "") + f"{whole}g.{size_gb}gb"
