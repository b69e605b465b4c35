"""Detection against a fake NVML that raises the real pynvml exceptions; cases carry their numbers (H1, H2, ...)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from lossyspec.cpu import multiplies_bf16
from lossyspec.device_names import canonical_cpu_name, canonical_device_name
from lossyspec.errors import EnvironmentProblem, LossyspecError
from lossyspec.hardware import (
    HardwareInfo,
    detect_hardware,
    device_name,
    render_lines,
    require_precision,
    supported_precisions,
    used_gpu,
)
from lossyspec.nvml import nvml_session

GIB = 2**30
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "uuid": "GPU-aaaa1111-0000",
    "busId": "00000000:3B:00.0",
    "total": 81559 * 2**20,
    "capability": (9, 0),
}
T4 = {
    "name": "Tesla T4",
    "uuid": "GPU-aaaa2222-0000",
    "busId": "00000000:1A:00.0",
    "total": 15360 * 2**20,
    "capability": (7, 5),
}
SLICE = {"name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "uuid": "MIG-5555-1", "total": 9728 * 2**20}
A100_MIG = {
    "name": "NVIDIA A100-SXM4-80GB",
    "uuid": "GPU-bbbb3333-0000",
    "busId": "00000000:07:00.0",
    "total": 81920 * 2**20,
    "capability": (8, 0),
    "slices": [None, SLICE],
}
NOT_SUPPORTED = pynvml.NVMLError_NotSupported
FIELDS = {  # function of NVML: (key of the fake device, default)
    "nvmlDeviceGetName": ("name", ""),
    "nvmlDeviceGetUUID": ("uuid", ""),
    "nvmlDeviceGetCudaComputeCapability": ("capability", (8, 0)),
    "nvmlDeviceGetEnforcedPowerLimit": ("limit", 700_000),
    "nvmlDeviceGetPowerUsage": ("draw", 120_500),
    "nvmlDeviceGetTemperature": ("temperature", 41),
    "nvmlDeviceGetTotalEnergyConsumption": ("energy", 5),
    "nvmlDeviceGetCurrentClocksEventReasons": ("reasons", 0x5),
    "nvmlDeviceGetClockInfo": ("clock", 1500),
    "nvmlDeviceGetMaxClockInfo": ("clock_max", 1980),
}


class FakeNvml:
    """NVML of `devices`; a value that is an exception class is raised instead of returned."""

    def __init__(self, *devices: dict[str, Any], init: Any = None) -> None:
        self.devices, self.init, self.open, self.opened = devices, init, 0, 0
        for function, (key, default) in FIELDS.items():
            setattr(self, function, lambda device, *_, key=key, default=default: self.get(device, key, default))

    @staticmethod
    def get(device: dict[str, Any], key: str, default: Any = None) -> Any:
        value = device.get(key, default)
        if isinstance(value, type) and issubclass(value, Exception):
            raise value()
        return value

    def nvmlInit(self) -> None:
        if self.init:
            raise self.init()
        self.open, self.opened = self.open + 1, self.opened + 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self.get({"handle": self.devices[index].get("handle", self.devices[index])}, "handle")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetPciInfo(self, device: dict[str, Any]) -> Any:
        return SimpleNamespace(busId=self.get(device, "busId", NOT_SUPPORTED))

    def nvmlDeviceGetMemoryInfo(self, device: dict[str, Any]) -> Any:
        return SimpleNamespace(total=self.get(device, "total", NOT_SUPPORTED))

    def nvmlDeviceGetComputeRunningProcesses(self, device: dict[str, Any]) -> Any:
        return self.get(device, "processes", [])

    def nvmlDeviceGetMigMode(self, device: dict[str, Any]) -> list[int]:
        if "slices" not in device:
            raise NOT_SUPPORTED()
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: dict[str, Any], index: int) -> Any:
        slices = device["slices"]
        if index >= len(slices) or slices[index] is None:
            raise pynvml.NVMLError_NotFound()
        return slices[index]

    def nvmlDeviceGetAttributes_v2(self, device: dict[str, Any]) -> Any:
        return SimpleNamespace(
            gpuInstanceSliceCount=device.get("gi", 1),
            computeInstanceSliceCount=device.get("ci", 1),
            memorySizeMB=device.get("mb", 9728),
        )


def detect(*devices: dict[str, Any], env: dict[str, str] | None = None, **kwargs: Any) -> HardwareInfo:
    nvml = FakeNvml(*devices)
    info = detect_hardware(nvml=nvml, environ=env or {}, **kwargs)
    assert nvml.open == 0 and nvml.opened == 1
    return info


def seen(info: HardwareInfo) -> list[str | None]:
    """UUIDs that CUDA sees, in its order."""
    return [gpu.uuid for gpu in sorted((g for g in info.gpus if g.visible), key=lambda g: g.cuda_index or 0)]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_reads_every_field_of_a_gpu() -> None:
    processes = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
        SimpleNamespace(pid=7, usedGpuMemory=2**64 - 1),
        SimpleNamespace(pid=8, usedGpuMemory=GIB),
    ]
    info = detect({**H100, "processes": processes, "reasons": 0x1004 | 0x400})
    gpu = info.gpus[0]
    assert (gpu.name, gpu.raw_name, gpu.compute_capability) == ("h100-sxm-80gb", "NVIDIA H100 80GB HBM3", "9.0")
    assert (gpu.memory_bytes, gpu.memory_source, gpu.unified) == (81559 * 2**20, "nvml", False)
    assert (gpu.driver, gpu.cuda_driver, gpu.pci_bus_id) == ("570.86.15", "12.8", "00000000:3B:00.0")
    assert (gpu.power_limit_w, gpu.power_draw_w, gpu.temperature_c) == (700.0, 120.5, 41)
    assert (gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, gpu.memory_clock_mhz) == (1500, 1980, 1500)
    assert gpu.throttle_reasons == ["sw_power_cap", "reliability", "unknown_0x1000"]
    assert [(p.pid, p.used_bytes) for p in gpu.processes or []] == [(7, None), (8, GIB)]
    assert (gpu.visible, gpu.cuda_index, gpu.energy_counter, gpu.mig, info.notes) == (True, 0, True, None, [])
    assert info.fingerprint["device"] == device_name(info) == "h100-sxm-80gb"


def test_clock_reasons_fall_back_to_the_older_name_and_to_none() -> None:
    nvml = FakeNvml(H100)
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda device: 0  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetCurrentClocksEventReasons = nvml_raises(pynvml.NVMLError_FunctionNotFound)  # type: ignore
    assert detect_hardware(nvml=nvml, environ={}).gpus[0].throttle_reasons == []
    del nvml.nvmlDeviceGetCurrentClocksThrottleReasons  # type: ignore[attr-defined]
    del nvml.nvmlDeviceGetCurrentClocksEventReasons  # type: ignore[attr-defined]
    info = detect_hardware(nvml=nvml, environ={})
    assert info.gpus[0].throttle_reasons is None and any("throttle_reasons" in note for note in info.notes)


def nvml_raises(error: type[Exception]) -> Any:
    def function(*_: Any) -> Any:
        raise error()

    return function


GB10 = {"name": "NVIDIA GB10", "uuid": "GPU-10", "busId": "0000000F:01:00.0", "capability": (12, 1)}


def test_H1_unified_memory_comes_from_torch_or_meminfo(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemTotal:       125000000 kB\n"})
    info = detect(GB10, proc_root=root)
    gpu = info.gpus[0]
    assert (gpu.memory_bytes, gpu.memory_source, gpu.unified) == (125000000 * 1024, "meminfo", True)
    assert any("shares the CPU's memory" in note and "meminfo" in note for note in info.notes)
    assert gpu.name == "gb10" and not any("memory_bytes" in note for note in info.notes)
    by_torch = detect(GB10, proc_root=root, torch_memory=lambda index: 120 * GIB if index == 0 else None).gpus[0]
    assert (by_torch.memory_bytes, by_torch.memory_source, by_torch.unified) == (120 * GIB, "torch", True)
    zero = detect({**GB10, "total": 0}, proc_root=tmp_path / "none", torch_memory=lambda index: 0).gpus[0]
    assert (zero.memory_bytes, zero.memory_source, zero.unified) == (None, None, True)


def test_H2_mig_slice_reports_its_own_memory_and_profile() -> None:
    info = detect(A100_MIG)
    whole, part = info.gpus
    assert (whole.mig, whole.visible, whole.memory_bytes) == ("enabled", False, 81920 * 2**20)
    assert (part.mig, part.memory_bytes, part.mig_parent_uuid) == ("1g.10gb", 9728 * 2**20, whole.uuid)
    assert (part.name, part.visible, part.cuda_index) == ("a100-sxm-80gb-mig-1g-10gb", True, 0)
    assert (part.power_draw_w, part.energy_counter, part.compute_capability) == (None, False, "8.0")
    assert used_gpu(info) == part and info.fingerprint["mig"] == "1g.10gb"


@pytest.mark.parametrize(
    ("attributes", "total_mb", "profile"),
    [
        ({"gi": 1, "ci": 1, "mb": 9728}, 81920, "1g.10gb"),
        ({"gi": 3, "ci": 1, "mb": 19968}, 40960, "1c.3g.20gb"),
        ({"gi": 1, "ci": 1, "mb": 16384}, 143771, "1g.18gb"),
    ],
)
def test_H2_profile_and_memory_from_attributes(attributes: dict[str, int], total_mb: int, profile: str) -> None:
    plain = {"name": NOT_SUPPORTED, "uuid": "MIG-1", "total": NOT_SUPPORTED, **attributes}
    part = detect({**A100_MIG, "total": total_mb * 2**20, "slices": [plain]}).gpus[1]
    assert (part.mig, part.memory_bytes, part.memory_source) == (profile, attributes["mb"] * 2**20, "nvml")


def test_H2_cuda_uses_one_slice_and_no_gpu_without_slices() -> None:
    other = {**SLICE, "uuid": "MIG-5555-2"}
    info = detect({**A100_MIG, "slices": [SLICE, other]}, H100)
    assert seen(info) == ["MIG-5555-1"] and any("single MIG slice" in note for note in info.notes)
    assert seen(detect({**A100_MIG, "slices": [SLICE, other]}, env={"CUDA_VISIBLE_DEVICES": "MIG-5555-2"})) == ["MIG-5555-2"]
    empty = detect({**A100_MIG, "slices": []})
    assert seen(empty) == [] and any("nvidia-smi mig -cgi" in note for note in empty.notes)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["GPU-aaaa1111-0000", "GPU-cccc-0000"]),
        ("0", ["GPU-aaaa1111-0000"]),
        ("1,0", ["GPU-cccc-0000", "GPU-aaaa1111-0000"]),
        ("GPU-cccc-0000", ["GPU-cccc-0000"]),
        ("GPU-c", ["GPU-cccc-0000"]),
        ("GPU-c,GPU-a", ["GPU-cccc-0000", "GPU-aaaa1111-0000"]),
        ("GPU-", []),
        ("GPU-9", []),
        ("MIG-12", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,7,1", ["GPU-aaaa1111-0000"]),
        ("0,-1,1", ["GPU-aaaa1111-0000"]),
        ("0,GPU-c", ["GPU-aaaa1111-0000"]),
        ("GPU-c,0", ["GPU-cccc-0000"]),
        ("1,1", []),
        (" 1", ["GPU-cccc-0000"]),
    ],
)
def test_H3_cuda_visible_devices(value: str | None, expected: list[str]) -> None:
    second = {**H100, "uuid": "GPU-cccc-0000", "busId": "00000000:5C:00.0"}
    info = detect(H100, second, env={} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    assert seen(info) == expected
    assert [gpu.cuda_index for gpu in info.gpus if not gpu.visible] == [None] * (2 - len(expected))
    assert bool(expected) != any("no GPU is visible" in note for note in info.notes)


@pytest.mark.parametrize("value", ["MIG-5555-1", "MIG-5", "GPU-bbbb3333-0000", "0"])
def test_H3_mig_uuid_is_never_a_number(value: str) -> None:
    assert seen(detect(A100_MIG, env={"CUDA_VISIBLE_DEVICES": value})) == ["MIG-5555-1"]


@pytest.mark.parametrize(
    "devices", [["GPU-aaaa1111-0000", "aaaa2222-0000"], ["0000:3b:00.0", "00000000:1A:00.0"], ["3B:00", "1a:00"]]
)
def test_H5_torch_order_matched_by_uuid_or_pci(devices: list[str]) -> None:
    info = detect(T4, H100, torch_devices=devices)
    assert [gpu.cuda_index for gpu in info.gpus] == [1, 0] and info.notes == []
    assert device_name(info) == "h100-sxm-80gb"


def test_H5_unlike_gpus_without_torch_are_ambiguous_unless_pci_order_or_uuid() -> None:
    info = detect(T4, H100)
    assert [gpu.cuda_index for gpu in info.gpus] == [None, None] and all(gpu.visible for gpu in info.gpus)
    assert any("CUDA_DEVICE_ORDER=PCI_BUS_ID" in note for note in info.notes)
    fixed = detect(H100, T4, env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"})
    assert seen(fixed) == [T4["uuid"]] and fixed.notes == []  # bus 1A before 3B, whatever NVML's order
    by_uuid = detect(T4, H100, env={"CUDA_VISIBLE_DEVICES": "GPU-aaaa1"})
    assert seen(by_uuid) == [H100["uuid"]] and by_uuid.notes == []


def test_H5_torch_device_unknown_to_nvml_keeps_the_numbers() -> None:
    info = detect(H100, torch_devices=["GPU-ffff", "GPU-aaaa1111-0000"])
    assert info.gpus[0].cuda_index == 1 and any("torch lists a GPU" in note for note in info.notes)
    assert seen(detect(H100, torch_devices=[])) == []
    assert len(detect(H100, torch_devices=["GPU-ffff", "GPU-ffff"]).notes) == 1


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (pynvml.NVMLError_LibraryNotFound, "--gpus all"),
        (pynvml.NVMLError_DriverNotLoaded, "modprobe"),
        (pynvml.NVMLError_LibRmVersionMismatch, "reboot"),
        (pynvml.NVMLError_Unknown, "nvidia-smi"),
    ],
)
def test_H6_no_driver_means_cpu_only_with_the_fix(error: type[Exception], fix: str) -> None:
    nvml = FakeNvml(H100, init=error)
    info = detect_hardware(nvml=nvml, environ={})
    assert info.gpus == [] and len([note for note in info.notes if fix in note]) == 1
    assert device_name(info).startswith("cpu-") and nvml.open == 0


def test_H6_missing_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert any("pip install nvidia-ml-py" in note for note in detect_hardware(environ={}).notes)


def test_H7_power_not_supported_is_none_with_one_note() -> None:
    info = detect({**H100, "draw": NOT_SUPPORTED, "limit": NOT_SUPPORTED})
    assert (info.gpus[0].power_draw_w, info.gpus[0].power_limit_w) == (None, None)
    assert info.notes == ["GPU 0: not read (Not Supported): power_limit_w, power_draw_w"]


def test_H8_bytes_name_and_wrong_package() -> None:
    gpu = detect({**H100, "name": b"NVIDIA H100 PCIe", "uuid": b"GPU-1", "busId": b"00000000:3B:00.0"}).gpus[0]
    assert (gpu.raw_name, gpu.name, gpu.uuid, gpu.pci_bus_id) == (
        "NVIDIA H100 PCIe",
        "h100-pcie-80gb",
        "GPU-1",
        "00000000:3B:00.0",
    )
    wrong = detect_hardware(nvml=SimpleNamespace(), environ={})
    assert wrong.gpus == [] and any("wrong pynvml package" in note and "nvidia-ml-py" in note for note in wrong.notes)


def test_H11_missing_energy_counter() -> None:
    info = detect({**H100, "energy": NOT_SUPPORTED}, {**T4, "energy": 0})
    assert [gpu.energy_counter for gpu in info.gpus] == [False, True]  # a counter at 0 mJ is still a counter
    assert any("energy_counter" in note for note in info.notes)


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("temperature", "temperature_c"),
        ("clock_max", "sm_clock_max_mhz"),
        ("capability", "compute_capability"),
        ("uuid", "uuid"),
        ("busId", "pci_bus_id"),
        ("processes", "processes"),
        ("name", "raw_name"),
        ("total", "memory_bytes"),
    ],
)
def test_H13_one_failed_field_leaves_the_others(key: str, field: str) -> None:
    info = detect({**H100, key: pynvml.NVMLError_Unknown}, T4)
    gpu = info.gpus[0]
    assert getattr(gpu, field) is None and not gpu.unified
    assert any(field in note and note.startswith("GPU 0:") for note in info.notes)
    assert gpu.power_draw_w == 120.5 and info.gpus[1].name == "t4-16gb"


def test_H13_a_lost_gpu_leaves_the_other() -> None:
    info = detect({**H100, "handle": pynvml.NVMLError_GpuIsLost}, T4)
    assert [gpu.index for gpu in info.gpus] == [1] and any("GPU is lost" in note for note in info.notes)


def test_nvml_is_shut_down_on_an_error() -> None:
    nvml, notes = FakeNvml(H100), list[str]()
    with pytest.raises(KeyboardInterrupt), nvml_session(nvml, notes):
        raise KeyboardInterrupt
    assert nvml.open == 0


def test_H17_nothing_reported_is_none_not_zero() -> None:
    info = detect({**H100, "draw": 0, "limit": 2**32 - 1, "clock": 0})
    gpu = info.gpus[0]
    assert (gpu.power_draw_w, gpu.power_limit_w, gpu.sm_clock_mhz) == (None, None, None)
    assert any("power_draw_w" in note for note in info.notes)
    bare = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
    )
    gpu = detect_hardware(nvml=bare, environ={}).gpus[0]
    absent = {name for name, value in gpu.model_dump().items() if value is None}
    assert {"memory_bytes", "power_draw_w", "sm_clock_mhz", "temperature_c", "processes", "uuid", "driver"} <= absent
    assert gpu.name == "unknown" and not gpu.energy_counter


@pytest.mark.parametrize(
    ("raw", "memory_gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", None, "h100-sxm-80gb"),
        ("NVIDIA H100 SXM", None, "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", None, "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", 93.6, "h100-nvl-94gb"),
        ("NVIDIA H200", 140.4, "h200-sxm-141gb"),
        ("NVIDIA H200 NVL", None, "h200-nvl-141gb"),
        ("NVIDIA A100-SXM4-40GB", None, "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", None, "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", None, "a100-pcie-40gb"),
        ("NVIDIA A100", None, "a100"),
        ("NVIDIA A100", 79.2, "a100-80gb"),
        ("Tesla T4", 15.0, "t4-16gb"),
        ("Tesla V100-SXM2-32GB", None, "v100-sxm-32gb"),
        ("NVIDIA GeForce RTX 3090", None, "rtx-3090-24gb"),
        ("NVIDIA GeForce RTX 4090", 23.99, "rtx-4090-24gb"),
        ("NVIDIA GeForce RTX 4090", 47.99, "rtx-4090-48gb"),
        ("NVIDIA GeForce RTX 5090", None, "rtx-5090-32gb"),
        ("NVIDIA GeForce RTX 3080", 10, "rtx-3080-10gb"),
        ("NVIDIA L4", 22.5, "l4-24gb"),
        ("NVIDIA L40S", 45, "l40s-48gb"),
        ("NVIDIA A10G", 22.5, "a10g-24gb"),
        ("NVIDIA B200", 179.1, "b200-sxm-180gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, "rtx-pro-6000-blackwell-server-96gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None, "rtx-pro-6000-blackwell-max-q-workstation-96gb"),
        ("NVIDIA RTX 6000 Ada Generation", None, "rtx-6000-ada-48gb"),
        ("NVIDIA GB10", None, "gb10"),
        ("NVIDIA GB10", 119.7, "gb10"),
        ("NVIDIA GH200 480GB", 95.6, "gh200-96gb"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None, "a100-sxm-80gb-mig-1g-10gb"),
        ("Foo (TM) Bar/9", 31, "foo-tm-bar-9"),
        ("", None, "unknown"),
    ],
)
def test_P3_canonical_names_and_they_are_stable(raw: str, memory_gib: float | None, name: str) -> None:
    assert canonical_device_name(raw, None if memory_gib is None else int(memory_gib * GIB)) == name
    assert canonical_device_name(name) == name


@pytest.mark.parametrize(
    ("model", "isa", "name"),
    [
        ("Intel(R) Xeon(R) Processor", ["avx2", "avx512f", "avx512_bf16"], "cpu-intel-xeon-avx512bf16-2c"),
        (
            "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
            ["avx512_bf16", "amx_bf16"],
            "cpu-intel-xeon-platinum-8481c-amxbf16-2c",
        ),
        ("AMD EPYC 7763 64-Core Processor", ["avx", "avx2"], "cpu-amd-epyc-7763-avx2-2c"),
        ("Neoverse-V2", ["neon", "sve", "bf16"], "cpu-neoverse-v2-svebf16-2c"),
        (None, [], "cpu-unknown-2c"),
    ],
)
def test_P3_canonical_cpu_names(model: str | None, isa: list[str], name: str) -> None:
    assert canonical_cpu_name(model, isa, 2) == name


def test_Q7_bf16_needs_compute_capability_8() -> None:
    old = detect(T4)
    assert supported_precisions(old) == {
        "fp32": None,
        "fp16": None,
        "bf16": "t4-16gb has compute capability 7.5, and bf16 needs 8.0 or newer",
        "fp8": "t4-16gb has compute capability 7.5, and fp8 needs 8.9 or newer",
        "int8": None,
        "int4-int8": "t4-16gb has compute capability 7.5, and int4 needs 8.0 or newer",
        "int4": "t4-16gb has compute capability 7.5, and int4 needs 8.0 or newer",
    }
    with pytest.raises(EnvironmentProblem, match=r"7\.5.*use one of: fp32, fp16"):
        require_precision(old, "bf16")
    require_precision(old, "fp16")
    assert set(supported_precisions(detect(H100)).values()) == {None}
    older = supported_precisions(detect(H100), "2.8.0+cu128")
    assert {name for name, why in older.items() if why is None} == {"fp32", "bf16", "fp16", "fp8"}
    assert older["int4"] == "torch 2.8.0+cu128 multiplies int8 weights on CPUs only; on GPUs they need torch 2.9 or newer"
    assert set(supported_precisions(detect(H100), "2.13.0+cu130").values()) == {None}
    plain = detect(T4, env={"CUDA_VISIBLE_DEVICES": ""})  # the CPU
    for isa, kernels in (([], False), (["avx2"], True), (["avx2", "avx512"], True)):
        known = supported_precisions(plain.model_copy(update={"cpu": plain.cpu.model_copy(update={"isa": isa})}))
        assert [known["int8"] is None, known["int4"] is None] == [kernels] * 2
        assert known["fp32"] is known["bf16"] is known["fp16"] is None
        assert known["fp8"] == "fp8 products need an NVIDIA GPU of compute capability 8.9 or newer"
    unknown = supported_precisions(detect({**H100, "capability": NOT_SUPPORTED}))
    assert [name for name, why in unknown.items() if "could not be read" in str(why)] == [
        "bf16",
        "fp8",
        "int4-int8",
        "int4",
    ]
    with pytest.raises(LossyspecError, match=r"Did you mean 'bf16'"):
        require_precision(old, "bf17")


CPUINFO = "".join(
    f"processor\t: {n}\nmodel name\t: Intel(R) Xeon(R) Processor\nphysical id\t: {n // 4}\ncore id\t\t: {n % 4 // 2}\n"
    "flags\t\t: fpu sse4_2 avx avx2 fma avx512f avx512_bf16 amx_tile\n\n"
    for n in range(8)
)


def test_cpu_topology_and_affinity(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/cpuinfo": CPUINFO,
            "proc/meminfo": "MemTotal: 1000 kB\n",
            "proc/self/status": "Name: x\nCpus_allowed_list:\t0-2,5\n",
        },
    )
    cpu = detect_hardware(nvml=SimpleNamespace(), environ={}, proc_root=root).cpu
    assert (cpu.sockets, cpu.physical_cores, cpu.logical_cores, cpu.usable_cores) == (2, 4, 8, 4)
    assert cpu.isa == ["sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile"]
    assert (cpu.quota_cores, cpu.memory_bytes, cpu.memory_limit_bytes) == (None, 1024000, None)


@pytest.mark.parametrize(
    ("words", "has"),
    [
        ("flags\t\t: avx2 avx512f avx512_bf16", True),
        ("flags\t\t: avx2 avx512f amx_tile amx_bf16", True),
        ("Features\t: asimd bf16", True),
        ("flags\t\t: avx2 avx512f avx512_vnni", False),
        ("", False),
    ],
)
def test_cpus_that_multiply_bf16(tmp_path: Path, words: str, has: bool) -> None:
    assert multiplies_bf16(write(tmp_path, {"proc/cpuinfo": f"processor\t: 0\n{words}\n"})) is has


@pytest.mark.parametrize(
    ("files", "quota", "limit", "usable"),
    [
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/b/memory.max": "4096\n",
            },
            2.5,
            4096,
            2,
        ),
        (
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n", "sys/fs/cgroup/memory.max": "max\n"},
            0.5,
            None,
            1,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/host/x\n4:memory:/host/x\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n",
            },
            3.0,
            8192,
            3,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/\n4:memory:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,
            None,
            8,
        ),
    ],
)
def test_cgroup_limits_v2_and_v1(
    tmp_path: Path, files: dict[str, str], quota: float | None, limit: int | None, usable: int
) -> None:
    root = write(tmp_path, {"proc/cpuinfo": CPUINFO, **files})
    cpu = detect_hardware(nvml=SimpleNamespace(), environ={}, proc_root=root).cpu
    assert (cpu.quota_cores, cpu.memory_limit_bytes, cpu.usable_cores) == (quota, limit, usable)


def test_arm_cpu(tmp_path: Path) -> None:
    text = "".join(
        f"processor\t: {n}\nFeatures\t: fp asimd sve bf16 i8mm\nCPU part\t: {part}\n\n"
        for n, part in enumerate(["0xd87", "0xd85", "0xd85", "0x123"])
    )
    topology = {
        f"sys/devices/system/cpu/cpu{n}/topology/{name}": value
        for n in range(4)
        for name, value in (("physical_package_id", "0\n"), ("core_id", f"{n}\n"))
    }
    root = write(tmp_path, {"proc/cpuinfo": text, **topology})
    cpu = detect_hardware(nvml=SimpleNamespace(), environ={}, proc_root=root).cpu
    assert cpu.model == "Cortex-A725+Cortex-X925+ARM-part-0x123" and cpu.isa == ["neon", "sve", "bf16", "i8mm"]
    assert (cpu.sockets, cpu.physical_cores, cpu.logical_cores) == (1, 4, 4)


def test_missing_proc_is_noted_not_guessed(tmp_path: Path) -> None:
    info = detect_hardware(nvml=SimpleNamespace(), environ={}, proc_root=tmp_path)
    assert info.cpu.memory_bytes is None and info.cpu.physical_cores is None and info.cpu.isa == []
    assert info.cpu.usable_cores >= 1 and {"/proc/cpuinfo", "/proc/meminfo"} <= {
        word.strip(":") for note in info.notes for word in note.split()
    }


def test_this_machine_round_trips_as_json() -> None:
    for info in (detect_hardware(), detect(T4, H100, A100_MIG)):
        assert HardwareInfo.model_validate(json.loads(json.dumps(info.model_dump(mode="json")))) == info


def test_render_lines_are_aligned_and_show_absent_as_na() -> None:
    lines = render_lines(detect({**H100, "draw": NOT_SUPPORTED}))
    assert any(line.startswith("  power:") and "n/a (limit 700 W" in line for line in lines)
    assert any("79.6 GiB (from nvml)" in line for line in lines) and "None" not in "\n".join(lines)
    starts = {len(line) - len(line.split(":", 1)[1].lstrip()) for line in lines}
    assert len(starts) == 1 and lines[0].split() == ["device", "used:", "h100-sxm-80gb"]


def test_detection_imports_neither_torch_nor_pynvml_early() -> None:
    code = (
        "import sys, lossyspec.hardware as h; assert not {'torch', 'pynvml'} & set(sys.modules);"
        "h.detect_hardware(); assert 'torch' not in sys.modules"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
