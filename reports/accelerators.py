"""Peak figures of known devices (`hardware_profiles/accelerators.json`): what a roofline needs, each with its source."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from lossyspec.errors import ConfigurationError, nearest
from lossyspec.settings import Model, validation_message

RATES = ("fp32", "fp16", "bf16", "fp8", "fp4")


class Accelerator(Model):
    """One device by the vendor's figures; rates are dense, never with structured sparsity.

    memory_bytes: sold memory, 1 GB = 1e9 bytes. bandwidth_bytes_per_s: of the device's own memory. power_w: the board's
    limit. flops_per_s: by precision; None where the device has no unit for it. source: a data sheet or white paper.
    checked: the day (ISO) on which the figures were last compared with published ones.
    """

    name: str = Field(min_length=1)
    product: str = Field(min_length=1)
    memory_bytes: int = Field(ge=10**9, le=10**13)
    bandwidth_bytes_per_s: float = Field(ge=1e9, le=1e14)
    power_w: float | None = Field(gt=0, le=10_000)
    flops_per_s: dict[str, float | None]
    source: str = Field(min_length=1)
    checked: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    note: str | None = None

    @field_validator("flops_per_s")
    @classmethod
    def _known_rates(cls, rates: dict[str, float | None]) -> dict[str, float | None]:
        for name, rate in rates.items():
            if name not in RATES:
                raise ValueError(f"{name!r} is not one of {', '.join(RATES)}.{nearest(name, RATES)}")
            if rate is not None and not 1e9 <= rate <= 1e17:
                raise ValueError(f"{name} is {rate:g}; allowed: 1e9 to 1e17 FLOP/s, or null")
        if not any(rates.values()):
            raise ValueError("at least one precision needs a rate")
        return rates

    def rate(self, precision: str) -> float | None:
        """Dense FLOP/s at a precision; None where the device cannot run it or the rate is not known."""
        return self.flops_per_s.get(precision)


class AcceleratorFile(Model):
    """accelerators.json, or a user's own file of the same form."""

    schema_: Literal["lossytune.accelerators/1"] = Field("lossytune.accelerators/1", alias="schema")
    about: str = ""
    devices: tuple[Accelerator, ...]


def read_accelerators(path: Path) -> dict[str, Accelerator]:
    """Devices of a file by name. Raises ConfigurationError naming the file, the device and what is allowed."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return _parse(text, str(path))


def known_accelerators(extra: Path | None = None) -> dict[str, Accelerator]:
    """The bundled devices by name; those of `extra`, a file of the same form, come on top."""
    place = files("lossyspec.hardware_profiles") / "accelerators.json"
    found = _parse(place.read_text(encoding="utf-8"), "accelerators.json")
    return found | (read_accelerators(extra) if extra else {})


def _parse(text: str, place: str) -> dict[str, Accelerator]:
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{place}: not a JSON file ({error})") from None
    if not isinstance(data, dict):
        raise ConfigurationError(f"{place}: expected a JSON object, found {type(data).__name__}")
    if data.get("schema") != "lossytune.accelerators/1":
        raise ConfigurationError(f"{place}: schema is {data.get('schema')!r}; expected 'lossytune.accelerators/1'")
    try:
        devices = AcceleratorFile.model_validate(data).devices
    except ValidationError as error:
        raise ConfigurationError(f"{place}: {validation_message(error, dict(AcceleratorFile.model_fields))}") from None
    names = [device.name for device in devices]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"{place}: {', '.join(twice)} is there more than once; names must differ")
    return {device.name: device for device in devices}


def find_name(name: str, names: Iterable[str], what: str) -> str:
    """The one of `names` that is `name`, or that alone begins with it; raises ConfigurationError with what is allowed."""
    known = sorted(set(names))
    if name in known:
        return name
    whole_words = [other for other in known if other.startswith(f"{name}-")]
    begun = whole_words or [other for other in known if name and other.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise ConfigurationError(f"{what} {name!r} is not one device: {', '.join(begun)}; write one of them in full")
    raise ConfigurationError(
        f"{what} {name!r} is not known; allowed: {', '.join(known) or 'none here'}.{nearest(name, known)}"
    )
