"""Which GPUs CUDA will use, as CUDA reads CUDA_VISIBLE_DEVICES, and under which number."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from .nvml import MIG_ENABLED, GpuInfo


def resolve_visibility(
    gpus: list[GpuInfo], environ: Mapping[str, str], torch_devices: Sequence[str] | None, notes: list[str]
) -> list[GpuInfo]:
    """`gpus` with `visible` and `cuda_index` set.

    torch_devices: UUID or PCI bus id of each device as torch enumerates them under this environment; it decides when
    given. Without it the environment is read as CUDA does: the first invalid entry ends the list.
    """
    targets = {
        at: target for at, gpu in enumerate(gpus) if not gpu.is_slice if (target := _cuda_target(gpus, at)) is not None
    }
    value, certain = environ.get("CUDA_VISIBLE_DEVICES"), True
    if torch_devices is not None:
        chosen = _from_torch(gpus, torch_devices, targets, notes)
    else:
        order = _pci_order(gpus, targets)
        chosen = [targets[at] for at in order]
        by_uuid = value is not None and value.strip()[:4].upper() in ("GPU-", "MIG-")
        if value is not None:
            pick = _pick_uuid if by_uuid else _pick_ordinal
            chosen = _from_entries(value, lambda entry: pick(entry, gpus, targets, order), notes)
        unlike = len({gpus[at].raw_name for at in order}) > 1
        certain = by_uuid or not unlike or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or not chosen
        chosen = _one_slice(gpus, chosen, notes)
    if not certain:
        notes.append(
            "the GPUs differ, so CUDA's numbers need not follow the PCI order assumed here; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID or name the GPU by UUID in CUDA_VISIBLE_DEVICES"
        )
    if targets and not chosen:
        notes.append(
            f"no GPU is visible to CUDA (CUDA_VISIBLE_DEVICES={value!r}): only the CPU is used; "
            "unset it or give a number or UUID from 'nvidia-smi -L'"
        )
    place = {at: number for number, at in enumerate(chosen)}
    return [
        gpu.model_copy(update={"visible": at in place, "cuda_index": place.get(at) if certain else None})
        for at, gpu in enumerate(gpus)
    ]


def _pci_order(gpus: list[GpuInfo], targets: Mapping[int, int]) -> list[int]:
    """The usable whole GPUs by PCI address, or as NVML lists them where one has no address."""
    addresses = {at: _pci(gpus[at].pci_bus_id or "") for at in targets}
    return sorted(targets, key=lambda at: addresses[at] or (0, 0, 0)) if all(addresses.values()) else list(targets)


def _cuda_target(gpus: list[GpuInfo], at: int) -> int | None:
    """What CUDA uses for the whole GPU at `at`: itself, its first slice, or None (MIG without a slice)."""
    if gpus[at].mig != MIG_ENABLED:
        return at
    return at + 1 if at + 1 < len(gpus) and gpus[at + 1].is_slice else None


def _from_entries(value: str, pick: Callable[[str], int | None], notes: list[str]) -> list[int]:
    chosen: list[int] = []
    for entry in value.split(","):
        at = pick(entry.strip())
        if at is None:
            if entry.strip() not in ("", "-1"):
                notes.append(
                    f"CUDA_VISIBLE_DEVICES: {entry.strip()!r} matches no GPU or several; CUDA ignores it and "
                    "what follows; use a number or UUID from 'nvidia-smi -L'"
                )
            return chosen
        if at in chosen:
            notes.append("CUDA_VISIBLE_DEVICES: a GPU is named twice, so CUDA shows none; name each once")
            return []
        chosen.append(at)
    return chosen


def _pick_uuid(entry: str, gpus: list[GpuInfo], targets: Mapping[int, int], order: list[int]) -> int | None:
    if entry[:4].upper() not in ("GPU-", "MIG-"):
        return None  # CUDA does not mix numbers and UUIDs in one list
    matches = [at for at, gpu in enumerate(gpus) if (gpu.uuid or "").lower().startswith(entry.lower())]
    if len(matches) != 1:
        return None
    return matches[0] if gpus[matches[0]].is_slice else targets.get(matches[0])


def _pick_ordinal(entry: str, gpus: list[GpuInfo], targets: Mapping[int, int], order: list[int]) -> int | None:
    digits = re.match(r"\+?(\d+)", entry)  # as strtoul: "1gpu" is 1
    return targets[order[int(digits[1])]] if digits and int(digits[1]) < len(order) else None


def _one_slice(gpus: list[GpuInfo], chosen: list[int], notes: list[str]) -> list[int]:
    """A CUDA process uses one MIG slice, and then nothing else."""
    first = next((at for at in chosen if gpus[at].is_slice), None)
    if first is None or len(chosen) == 1:
        return chosen
    notes.append(
        f"CUDA uses a single MIG slice ({gpus[first].label}) and then no other GPU; choose one with "
        "CUDA_VISIBLE_DEVICES=MIG-<uuid>"
    )
    return [first]


def _from_torch(gpus: list[GpuInfo], devices: Sequence[str], targets: Mapping[int, int], notes: list[str]) -> list[int]:
    chosen: list[int] = []
    for device in devices:
        key, address = re.sub(r"^(gpu|mig)-", "", device.lower()), _pci(device)
        at = next(
            (
                at
                for at, gpu in enumerate(gpus)
                if key == re.sub(r"^(gpu|mig)-", "", (gpu.uuid or "").lower())
                or (address is not None and address == _pci(gpu.pci_bus_id or ""))
            ),
            None,
        )
        if at is None:
            notes.append(f"torch lists a GPU that NVML does not: {device}; check that both see the same container")
            at = -1 - len(chosen)  # keeps the numbers of those that follow
        chosen.append(targets.get(at, at))
    return chosen


def _pci(text: str) -> tuple[int, int, int] | None:
    """(domain, bus, device) of "00000000:3B:00.0", "0000:3b:00.0" or "3b:00"; None for anything else."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.\d)?", text.strip().lower())
    return (int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16)) if match else None
