"""Hardware profiles: tuned settings with the evidence for them, and what they were tuned on. Pure data, no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import platformdirs
from pydantic import Field

from .errors import ConfigurationError
from .hardware import HardwareInfo, device_name, used_gpu
from .records import Estimate, Quality, dump, read_record, write_record
from .settings import Model, Sampling, Settings


class Device(Model):
    """The device a profile was tuned on, by canonical name."""

    kind: Literal["cpu", "cuda"]
    name: str
    compute_capability: str | None = None
    memory_bytes: int | None = None
    mig: str | None = None
    count: int = 1


class ModelIdentity(Model):
    """A model or a feature head by its hashes; id and revision are for people. The kinds `ngram` and `self` (the target
    itself) have no weights of their own."""

    kind: Literal["model", "head", "ngram", "self"] = "model"
    id: str
    revision: str | None = None
    config_sha256: str | None = None
    weights_sha256: str | None = None


class MatchFields(Model):
    """What has to fit for the profile's numbers to hold. `relax`: fields that may differ (match level `compatible`)."""

    device: Device
    target: ModelIdentity
    draft: ModelIdentity
    tokenizer_sha256: str
    versions: dict[str, str] = {}
    relax: tuple[str, ...] = ("versions",)


class Evidence(Model):
    """The measured figures behind the settings. Speeds: decoding, batch size as tuned. None: not measured."""

    batch_size: int
    speedup: Estimate
    lossless_speedup: Estimate | None
    predicted_speedup: float | None
    plain_tokens_per_s: float
    transformers_tokens_per_s: float | None
    quality: Quality
    tokens_per_round: float | None
    acceptance: float | None
    length_ratio: float | None
    ttft_ms: float | None
    itl_ms: dict[str, float] | None
    memory_peak_bytes: int | None
    energy_j_per_token: float | None = None


class Provenance(Model):
    """How the profile came about."""

    versions: dict[str, str]
    sampler: str
    seed: int
    trials: dict[str, int]
    workload: dict[str, Any]
    max_quality_loss: float
    source: Literal["measured"] = "measured"


class Profile(Model):
    """profile.json. `id` is the hash of all other fields; without one the file counts as written by hand."""

    schema_: Literal["lossytune.profile/1"] = Field("lossytune.profile/1", alias="schema")
    id: str | None = None
    created: str
    task: str
    match: MatchFields
    settings: Settings
    sampling: Sampling
    evidence: Evidence
    provenance: Provenance

    def content_id(self) -> str:
        """The id that fits the content."""
        data = dump(self)
        data.pop("id")
        if not self.settings.attention.block:  # dense, as in all profiles that are older than the field
            del data["settings"]["attention"]
        for name in ("compile", "cuda_graphs"):  # they are younger too
            if data["settings"][name] == Settings.model_fields[name].default:
                del data["settings"][name]
        if data["evidence"]["quality"]["tv_spread"] is None:  # profiles from before it was recorded keep their id
            data["evidence"]["quality"].pop("tv_spread")
        return "sha256:" + hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Match:
    """How a profile fits: `exact`, `compatible` (reasons), `forced` (reasons), or `none` (lossless defaults)."""

    level: Literal["exact", "compatible", "forced", "none"]
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Here:
    """This machine and these models, to be held against a profile."""

    device: Device
    target: ModelIdentity
    draft: ModelIdentity
    tokenizer_sha256: str
    versions: dict[str, str]


def device_of(info: HardwareInfo) -> Device:
    """The device that models would run on: the first visible GPU, else the CPU."""
    gpu = used_gpu(info)
    if gpu is None:
        return Device(kind="cpu", name=device_name(info), memory_bytes=info.cpu.memory_bytes)
    return Device(
        kind="cuda",
        name=gpu.name,
        compute_capability=gpu.compute_capability,
        memory_bytes=gpu.memory_bytes,
        mig=gpu.mig,
        count=1,
    )


def compare(profile: Profile, here: Here) -> tuple[list[str], list[str]]:
    """(differences that refuse the profile, differences that it relaxes), each as 'field: tuned on X, here Y'."""
    tuned = profile.match
    hard: list[str] = []
    soft: list[str] = []

    def check(name: str, then: Any, now: Any, group: str = "") -> None:
        if then != now and then is not None:
            relaxed = name in tuned.relax or (group and group in tuned.relax)
            (soft if relaxed else hard).append(f"{name}: tuned on {_short(name, then)}, here {_short(name, now)}")

    for field in ("kind", "name", "compute_capability"):
        check(f"device.{field}", getattr(tuned.device, field), getattr(here.device, field))
    check("device.mig", tuned.device.mig or "no slice", here.device.mig or "no slice")
    for role, then, now in (("target", tuned.target, here.target), ("draft", tuned.draft, here.draft)):
        for field in ("kind", "config_sha256", "weights_sha256"):
            check(f"{role}.{field}", getattr(then, field), getattr(now, field))
    check("tokenizer_sha256", tuned.tokenizer_sha256, here.tokenizer_sha256)
    for name, version in tuned.versions.items():
        check(f"versions.{name}", version, here.versions.get(name), group="versions")
    memory, now_bytes = tuned.device.memory_bytes, here.device.memory_bytes
    if tuned.device.kind == "cuda" and memory and now_bytes and abs(memory - now_bytes) > 0.05 * memory:
        hard.append(f"device.memory_bytes: tuned on {memory}, here {now_bytes}")
    return hard, soft


def _short(name: str, value: Any) -> Any:
    """A hash by its beginning, which is enough to tell two apart; everything else whole."""
    return f"{value[:12]}.." if name.endswith("sha256") and value and len(value) > 12 else value


def read_profile(path: Path) -> Profile:
    """Reads and validates a profile. Raises ConfigurationError naming the file, the field and what is allowed."""
    profile = read_record(path, Profile)
    if profile.id is not None and profile.id != profile.content_id():
        raise ConfigurationError(
            f"{path}: its content was changed after it was written (its id says "
            f"{profile.id[:19]}.., the content is {profile.content_id()[:19]}..); restore the file, or remove "
            f"the key 'id' to use it as a profile written by hand"
        )
    return profile


def write_profile(path: Path, profile: Profile) -> Profile:
    """Writes a profile under its content id, atomically; returns it with that id."""
    profile = profile.model_copy(update={"id": profile.content_id()})
    write_record(path, profile)
    return profile


def user_profile_folder() -> Path:
    """Where `lossytune search` keeps the profiles of this user: LOSSYTUNE_PROFILES, else the user's data folder."""
    return Path(os.environ.get("LOSSYTUNE_PROFILES") or Path(platformdirs.user_data_dir("lossytune")) / "profiles")


def kept_path(profile: Profile) -> Path:
    """Where a profile of this user is kept under its name."""
    content = profile.content_id().removeprefix("sha256:")
    return user_profile_folder() / f"{profile.match.device.name}-{profile.task}-{content[:8]}.json"


def bundled_files() -> list[Path]:
    """The JSON files that ship with lossytune, profiles among them."""
    try:
        folder = resources.files("lossyspec.hardware_profiles")
    except ModuleNotFoundError:  # the runtime was vendored without its data
        return []
    return sorted(Path(str(item)) for item in folder.iterdir() if item.name.endswith(".json"))


def known_profiles() -> Iterator[tuple[Path, Profile | ConfigurationError]]:
    """All profiles of this user, newest first, then the bundled ones; an unreadable file comes with its error."""
    own = sorted(user_profile_folder().glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (*own, *bundled_files()):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(data, dict) and str(data.get("schema")).startswith("lossytune.profile/"):
                yield path, read_profile(path)
        except ConfigurationError as error:
            yield path, error
        except (OSError, ValueError) as error:
            yield path, ConfigurationError(f"{path}: {error}")


def choose(here: Here, task: str | None) -> tuple[Profile | None, Match]:
    """The best profile for this machine, these models and a task: exact before compatible, newest first."""
    found: list[tuple[Profile, list[str]]] = []
    closest: list[str] = []
    for _, item in known_profiles():
        if isinstance(item, ConfigurationError):
            closest.append(str(item))
            continue
        if task is not None and item.task != task:
            continue
        hard, soft = compare(item, here)
        if not hard:
            found.append((item, soft))
        elif not closest:
            closest = hard
    if not found:
        wanted = f"for task {task!r}" if task else "for any task"
        return None, Match("none", (f"no profile {wanted} fits {here.device.name}", *closest))
    profile, soft = min(found, key=lambda item: len(item[1]) > 0)
    return profile, Match("compatible" if soft else "exact", tuple(soft))
