"""One canonical name for each device, whatever the driver or the vendor's page calls it."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
