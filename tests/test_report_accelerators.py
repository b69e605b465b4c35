"""The table of known devices: figures that were looked up by hand, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lossyspec.device_names import canonical_device_name
from lossyspec.errors import ConfigurationError
from lossyspec.reports.accelerators import find_name, known_accelerators, read_accelerators

#: name as NVML says it, GB of memory as NVML says it: bandwidth in GB/s, dense TFLOP/s of bf16 (None: no unit), watt
LOOKED_UP: dict[tuple[str, float | None], tuple[float, float | None, float]] = {
    ("Tesla T4", 15.0): (320, None, 70),
    ("NVIDIA L4", 22.5): (300, 121, 72),
    ("NVIDIA L40S", 45.0): (864, 362, 350),
    ("NVIDIA A10G", 22.5): (600, 70, 300),
    ("NVIDIA A100-SXM4-40GB", 40.0): (1555, 312, 400),
    ("NVIDIA A100 80GB PCIe", 80.0): (1935, 312, 300),
    ("NVIDIA A100-SXM4-80GB", 80.0): (2039, 312, 400),
    ("NVIDIA H100 PCIe", 80.0): (2000, 756, 350),
    ("NVIDIA H100 80GB HBM3", 80.0): (3350, 989, 700),
    ("NVIDIA H200", 141.0): (4800, 989, 700),
    ("NVIDIA B200", 179.0): (8000, 2250, 1000),
    ("NVIDIA GeForce RTX 3090", 24.0): (936, 71, 350),
    ("NVIDIA GeForce RTX 4090", 24.0): (1008, 165, 450),
    ("NVIDIA GeForce RTX 5090", 32.0): (1792, 209.5, 575),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96.0): (1792, 503.8, 600),
    ("NVIDIA GB10", None): (273, 125, 140),
}


def test_figures_are_the_looked_up_ones_under_the_name_that_detection_gives() -> None:
    known = known_accelerators()
    assert len(known) >= 15
    for (raw, memory_gb), (bandwidth, rate, power) in LOOKED_UP.items():
        device = known[canonical_device_name(raw, int(memory_gb * 2**30) if memory_gb else None)]
        assert device.bandwidth_bytes_per_s == pytest.approx(bandwidth * 1e9, rel=1e-3), raw
        found = device.rate("bf16")
        assert found is None if rate is None else found == pytest.approx(rate * 1e12, rel=2e-3), raw
        assert device.power_w == power, raw


def test_every_device_is_plausible_and_has_a_source() -> None:
    """A rate with sparsity, or a unit off by a thousand, shows in the ratios."""
    for device in known_accelerators().values():
        assert device.source.startswith("https://"), device.name
        half, single, eighth = device.rate("fp16"), device.rate("fp32"), device.rate("fp8")
        assert half is not None and single is not None
        assert 30 <= half / device.bandwidth_bytes_per_s <= 600, device.name  # FLOP a byte at the roofline's knee
        assert 1.5 <= half / single <= 33, device.name
        assert eighth is None or eighth == pytest.approx(2 * half, rel=0.02), device.name
        assert device.rate("bf16") in (None, half)
        assert device.rate("int3") is None


def entry(**values: Any) -> dict[str, Any]:
    known = {
        "name": "my-cpu", "product": "My CPU", "memory_bytes": 64 * 10**9, "bandwidth_bytes_per_s": 4e10, "power_w": None,
        "flops_per_s": {"fp32": 1e11}, "source": "STREAM, measured", "checked": "2026-01-02",
    }  # fmt: skip
    return known | values


def write(path: Path, *entries: dict[str, Any], schema: str = "lossytune.accelerators/1") -> Path:
    path.write_text(json.dumps({"schema": schema, "devices": entries}))
    return path


def test_a_users_file_adds_devices_and_overrides_bundled_ones(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.json", entry(), entry(name="l4-24gb", power_w=60.0))
    known = known_accelerators(mine)
    assert known["my-cpu"].rate("fp32") == 1e11 and known["my-cpu"].rate("bf16") is None
    assert known["l4-24gb"].power_w == 60.0 and "h200-sxm-141gb" in known


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bandwidth_bytes_per_s": 40.0}, "bandwidth_bytes_per_s is 40.0"),
        ({"flops_per_s": {"bf61": 1e12}}, "'bf61' is not one of fp32"),
        ({"flops_per_s": {"bf16": 312.0}}, "bf16 is 312; allowed: 1e9 to 1e17"),
        ({"flops_per_s": {"bf16": None}}, "at least one precision"),
        ({"checked": "last year"}, "checked is 'last year'"),
        ({"price": 3.0}, "unknown key"),
        ({"power_w": 0.0}, "power_w is 0.0"),
    ],
)
def test_a_wrong_figure_is_refused_by_name(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_accelerators(write(tmp_path / "mine.json", entry(**values)))
    assert said in str(caught.value) and "mine.json" in str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"schema is 'lossytune.accelerators/2'; expected"):
        read_accelerators(write(tmp_path / "new.json", entry(), schema="lossytune.accelerators/2"))
    with pytest.raises(ConfigurationError, match="my-cpu is there more than once"):
        read_accelerators(write(tmp_path / "twice.json", entry(), entry()))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not a JSON file"):
        read_accelerators(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"list\.json: expected a JSON object, found list"):
        read_accelerators(tmp_path / "list.json")
    with pytest.raises(ConfigurationError, match=r"absent\.json: no such file"):
        read_accelerators(tmp_path / "absent.json")
    with pytest.raises(ConfigurationError, match=r"cannot be read \(Is a directory\)"):
        read_accelerators(tmp_path)


def test_a_name_may_be_short_when_it_is_one_device() -> None:
    names = ["h200-sxm-141gb", "h200-nvl-141gb", "b200-sxm-180gb"]
    assert find_name("b200", names, "--predict") == "b200-sxm-180gb"
    assert find_name("h200-n", names, "--predict") == "h200-nvl-141gb"
    assert find_name("l4", ["l40s-48gb", "l4-24gb"], "--price") == "l4-24gb"
    with pytest.raises(ConfigurationError, match="is not one device: h200-nvl-141gb, h200-sxm-141gb"):
        find_name("h200", names, "--predict")
    with pytest.raises(ConfigurationError, match=r"--predict 'b20-sxm-180gb' is not known.*Did you mean 'b200-sxm-180gb'"):
        find_name("b20-sxm-180gb", names, "--predict")
