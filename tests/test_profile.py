"""Profiles: identity by content, what has to match, and what is said when nothing does."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import save_tiny

from lossyspec.decoder import Decoder, identify_here
from lossyspec.errors import ConfigurationError, ProfileMismatch
from lossyspec.hardware import canonical_device_name, detect_hardware
from lossyspec.loading import load
from lossyspec.nvml import GpuInfo
from lossyspec.profile import (
    Device,
    Evidence,
    Here,
    Match,
    MatchFields,
    ModelIdentity,
    Profile,
    Provenance,
    bundled_files,
    choose,
    compare,
    device_of,
    known_profiles,
    read_profile,
    user_profile_folder,
    write_profile,
)
from lossyspec.records import Estimate, Quality, dump
from lossyspec.settings import Attention, Precisions, Sampling, ScheduleRow, Settings

H100 = Device(kind="cuda", name="h100-sxm-80gb", compute_capability="9.0", memory_bytes=80 * 2**30)
TARGET = ModelIdentity(id="embedded", config_sha256="c1", weights_sha256="w1")
NGRAM = ModelIdentity(kind="ngram", id="ngram")
HERE = Here(H100, TARGET, NGRAM, "tok", {"torch": "2.13", "transformers": "5.24"})


def profile(here: Here = HERE, task: str = "dialogue", relax: tuple[str, ...] = ("versions",), **settings: Any) -> Profile:
    """A profile that was tuned `here`."""
    values = {"alpha": 0.3, "schedule": (ScheduleRow(batch=(1, 4), draft_length=5),), **settings}
    quality = Quality(
        perplexity_ratio=Estimate(value=1.02, ci95=(1.01, 1.03)),
        tokens=100,
        texts=4,
        corpus="target_samples",
        tv=0.01,
        kl_forward=0.02,
        kl_reverse=None,
        certificate=1 / 0.7,
    )
    return Profile(
        created="2027-01-01T00:00:00+00:00",
        task=task,
        match=MatchFields(
            device=here.device,
            target=here.target,
            draft=here.draft,
            tokenizer_sha256=here.tokenizer_sha256,
            versions=here.versions,
            relax=relax,
        ),
        settings=Settings(**values),
        sampling=Sampling(temperature=0.7),
        evidence=Evidence(
            batch_size=1,
            speedup=Estimate(value=1.5, ci95=(1.4, 1.6)),
            lossless_speedup=None,
            predicted_speedup=1.52,
            plain_tokens_per_s=20.0,
            transformers_tokens_per_s=18.0,
            quality=quality,
            tokens_per_round=2.0,
            acceptance=None,
            length_ratio=1.0,
            ttft_ms=None,
            itl_ms={"p50": 1.0},
            memory_peak_bytes=None,
        ),
        provenance=Provenance(
            versions={"lossytune": "0.1.0"},
            sampler="tpe",
            seed=0,
            trials={"complete": 3},
            workload={"source": "bundled"},
            max_quality_loss=0.05,
        ),
    )


def stored(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def store(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_profile_survives_the_disk_under_the_hash_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    written = write_profile(path, profile())
    assert written.id == profile().content_id()
    assert read_profile(path) == written
    assert stored(path)["schema"] == "lossytune.profile/1"


def test_the_id_follows_the_content_and_not_the_id_or_the_order_of_keys(tmp_path: Path) -> None:
    base = write_profile(tmp_path / "a.json", profile())
    assert base.content_id() == base.id
    assert write_profile(tmp_path / "b.json", base).id == base.id
    assert profile(alpha=0.31).content_id() != base.id
    assert profile(task="code").content_id() != base.id
    sparse = Attention(block=32, sink=1, window=4, top=16, side="verify")
    assert profile(attention=sparse).content_id() != base.id
    assert profile(compile="inductor").content_id() != base.id
    assert profile(cuda_graphs=False).content_id() != base.id
    shuffled = dict(reversed(stored(tmp_path / "a.json").items()))
    assert read_profile(store(tmp_path / "c.json", shuffled)).id == base.id


def test_a_profile_from_before_attention_loads_as_dense_under_its_own_id(tmp_path: Path) -> None:
    written = write_profile(tmp_path / "new.json", profile())
    data = dump(written)
    assert data["settings"].pop("attention")["block"] == 0
    assert (data["settings"].pop("compile"), data["settings"].pop("cuda_graphs")) == ("off", True)
    assert data["evidence"]["quality"].pop("tv_spread") is None  # recorded later still
    data["id"] = None
    content = {name: value for name, value in data.items() if name != "id"}
    data["id"] = "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    again = read_profile(store(tmp_path / "old.json", data))
    assert again.settings.attention == Attention()
    assert again.id == data["id"] == written.id


def test_a_profile_with_sparse_attention_and_the_draft_self_survives_its_file(tmp_path: Path) -> None:
    sparse = Attention(block=16, sink=0, window=1, top=3, side="draft")
    written = write_profile(tmp_path / "p.json", profile(attention=sparse))
    assert read_profile(tmp_path / "p.json") == written
    assert written.settings.attention == sparse


def test_a_profile_from_before_the_spread_was_recorded_keeps_its_id(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    data = dump(write_profile(path, profile()))
    assert data["evidence"]["quality"].pop("tv_spread") is None
    path.write_text(json.dumps(data))
    assert read_profile(path).id == data["id"]
    data["evidence"]["quality"]["tv_spread"] = 0.1
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigurationError, match="its content was changed"):
        read_profile(path)


def test_a_profile_that_was_edited_by_hand_is_refused_with_advice_and_read_without_its_id(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, profile())
    data = stored(path)
    data["settings"]["alpha"] = 0.9
    store(path, data)
    with pytest.raises(ConfigurationError, match=r"profile\.json: its content was changed .*remove the key 'id'"):
        read_profile(path)
    del data["id"]
    edited = read_profile(store(path, data))
    assert (edited.id, edited.settings.alpha) == (None, 0.9)


def test_an_id_that_never_was_a_hash_is_refused(tmp_path: Path) -> None:
    path = store(tmp_path / "p.json", {**dump(profile()), "id": "mine"})
    with pytest.raises(ConfigurationError, match="its content was changed"):
        read_profile(path)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("settings", "alpha"), 1.5, "settings.alpha is 1.5"),
        (("settings", "alpha"), float("nan"), "settings.alpha is nan"),
        (("settings", "alhpa"), 0.1, "unknown key 'settings.alhpa'. Did you mean 'alpha'?"),
        (("match", "device", "nam"), "x", "unknown key 'match.device.nam'. Did you mean 'name'?"),
        (("evidence", "speedup", "value"), float("inf"), "evidence.speedup.value is inf"),
        (("schema",), "lossytune.profile/2", "newer lossytune"),
        (("schema",), "lossytune.profile/0", "expected 'lossytune.profile/1'"),
        (("match", "device", "kind"), "tpu", "'cpu' or 'cuda'"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path: Path, place: tuple[str, ...], value: Any, said: str) -> None:
    data = dump(profile())
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ConfigurationError) as caught:
        read_profile(store(tmp_path / "p.json", data))
    assert str(caught.value).startswith(str(tmp_path / "p.json"))
    assert said in str(caught.value)


def test_a_missing_field_is_named_and_the_rest_is_not_repeated(tmp_path: Path) -> None:
    data = dump(profile())
    del data["evidence"]
    with pytest.raises(ConfigurationError, match=r"p\.json: evidence is missing$"):
        read_profile(store(tmp_path / "p.json", data))


def test_case_25_an_explicit_zero_in_a_profile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, profile(alpha=0.0, theta=0.0, draft_length=0, schedule=()))
    settings = read_profile(path).settings
    assert (settings.alpha, settings.theta, settings.draft_length) == (0.0, 0.0, 0)
    assert settings.lossless


# match


def test_the_same_machine_and_models_match_exactly() -> None:
    assert compare(profile(), HERE) == ([], [])


def test_other_versions_are_compatible_unless_they_must_not_differ() -> None:
    later = replace(HERE, versions={"torch": "2.14", "transformers": "5.24"})
    assert compare(profile(), later) == ([], ["versions.torch: tuned on 2.13, here 2.14"])
    assert compare(profile(relax=()), later) == (["versions.torch: tuned on 2.13, here 2.14"], [])
    assert compare(profile(), replace(HERE, versions={}))[1][0] == "versions.torch: tuned on 2.13, here None"


@pytest.mark.parametrize(
    ("here", "field"),
    [
        (replace(HERE, device=H100.model_copy(update={"name": "h200-sxm-141gb"})), "device.name"),
        (replace(HERE, device=H100.model_copy(update={"compute_capability": "8.0"})), "device.compute_capability"),
        (replace(HERE, device=H100.model_copy(update={"memory_bytes": 10 * 2**30})), "device.memory_bytes"),
        (replace(HERE, device=Device(kind="cpu", name="h100-sxm-80gb", compute_capability="9.0")), "device.kind"),
        (replace(HERE, target=TARGET.model_copy(update={"weights_sha256": "w2"})), "target.weights_sha256"),
        (replace(HERE, target=TARGET.model_copy(update={"config_sha256": "c2"})), "target.config_sha256"),
        (replace(HERE, draft=ModelIdentity(id="d", config_sha256="c", weights_sha256="w")), "draft.kind"),
        (replace(HERE, tokenizer_sha256="other"), "tokenizer_sha256"),
    ],
)
def test_P5_what_differs_is_named_with_both_values(here: Here, field: str) -> None:
    hard, soft = compare(profile(), here)
    assert soft == []
    assert len(hard) == 1
    assert hard[0].startswith(f"{field}: tuned on ")
    assert ", here " in hard[0]


def test_a_slice_of_a_gpu_is_not_the_gpu() -> None:
    slice_ = H100.model_copy(update={"mig": "1g.10gb", "memory_bytes": 10 * 2**30})
    assert any("mig" in line for line in compare(profile(replace(HERE, device=slice_)), HERE)[0])
    assert any("memory_bytes" in line for line in compare(profile(), replace(HERE, device=slice_))[0])


def test_names_and_revisions_of_models_and_a_little_memory_do_not_count() -> None:
    here = replace(
        HERE,
        device=H100.model_copy(update={"memory_bytes": int(79.5 * 2**30)}),
        target=TARGET.model_copy(update={"id": "/elsewhere", "revision": "abc"}),
    )
    assert compare(profile(), here) == ([], [])


def test_a_field_can_be_relaxed_by_its_full_name() -> None:
    other = replace(HERE, device=H100.model_copy(update={"name": "h200-sxm-141gb"}))
    assert compare(profile(relax=("device.name",)), other) == (
        [],
        ["device.name: tuned on h100-sxm-80gb, here h200-sxm-141gb"],
    )


def test_P3_two_spellings_of_one_device_match() -> None:
    """H100 80GB HBM3 and H100 SXM are one device, H100 PCIe is another."""

    def on(raw: str) -> Here:
        info = detect_hardware().model_copy(update={"gpus": []})
        name = canonical_device_name(raw, 80 * 2**30)
        gpu = GpuInfo.model_construct(
            name=name, memory_bytes=80 * 2**30, compute_capability="9.0", mig=None, visible=True, cuda_index=0
        )
        return replace(HERE, device=device_of(info.model_copy(update={"gpus": [gpu]})))

    assert compare(profile(on("NVIDIA H100 80GB HBM3")), on("NVIDIA H100 SXM")) == ([], [])
    assert compare(profile(on("NVIDIA H100 80GB HBM3")), on("NVIDIA H100 PCIe"))[0] != []


# the known ones


@pytest.fixture(autouse=True)
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of bundled profiles, empty here: those of the repository must not change what is tested."""
    folder = tmp_path / "bundled"
    folder.mkdir()
    monkeypatch.setattr("lossyspec.profile.resources", SimpleNamespace(files=lambda name: folder))
    monkeypatch.setattr("lossyspec.profile.bundled_files", bundled_files)  # conftest leaves none
    return folder


def keep(name: str, item: Profile, age: int) -> Path:
    path = user_profile_folder() / name
    write_profile(path, item)
    os.utime(path, (1_000_000 - age, 1_000_000 - age))
    return path


def test_known_profiles_come_newest_first_and_a_broken_file_with_its_error_once() -> None:
    older, newer = keep("a.json", profile(), age=9), keep("b.json", profile(task="code"), age=1)
    broken = user_profile_folder() / "c.json"
    broken.write_text("{", encoding="utf-8")
    edited = store(user_profile_folder() / "d.json", {**dump(profile()), "id": "sha256:0"})
    other = store(user_profile_folder() / "e.json", {"schema": "lossytune.other/1"})
    store(user_profile_folder() / "f.json", [1, 2])
    found = dict(known_profiles())
    assert [path for path in found if path in (older, newer)] == [newer, older]
    assert set(found) - {older, newer} == {broken, edited}
    assert other not in found
    for path in (broken, edited):
        assert isinstance(found[path], ConfigurationError)
        assert str(found[path]).count(str(path)) == 1


def test_the_profile_folder_is_the_variables_or_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert user_profile_folder() == tmp_path / "profiles"
    monkeypatch.setenv("LOSSYTUNE_PROFILES", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert user_profile_folder().name == "profiles"
    assert user_profile_folder() != Path("profiles")


def test_bundled_profiles_come_after_the_users(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = bundled / "a.json"
    write_profile(shipped, profile(alpha=0.9))
    assert choose(HERE, None)[0] == read_profile(shipped)
    own = keep("z.json", profile(alpha=0.1), age=10**6)
    assert [path for path, _ in known_profiles()] == [own, shipped]
    assert choose(HERE, None)[0] == read_profile(own)

    def vendored(name: str) -> Path:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("lossyspec.profile.resources", SimpleNamespace(files=vendored))
    assert [path for path, _ in known_profiles()] == [own]


def test_exact_comes_before_compatible_and_newer_before_older_and_the_task_counts() -> None:
    before = replace(HERE, versions={"torch": "2.0"})
    keep("compatible.json", profile(before, alpha=0.1), age=0)
    keep("older.json", profile(alpha=0.2), age=9)
    keep("newer.json", profile(alpha=0.3), age=5)
    keep("code.json", profile(alpha=0.4, task="code"), age=1)
    keep("elsewhere.json", profile(replace(HERE, tokenizer_sha256="x"), alpha=0.5), age=1)
    best, match = choose(HERE, "dialogue")
    assert best is not None
    assert (best.settings.alpha, match) == (0.3, Match("exact", ()))
    assert choose(HERE, None)[0] == read_profile(user_profile_folder() / "code.json")
    best, match = choose(replace(HERE, versions={"torch": "2.1"}), "dialogue")
    assert best is not None
    assert match.level == "compatible"
    assert match.reasons[0].startswith("versions.torch")


def test_P1_nothing_known_says_so_with_what_came_closest() -> None:
    assert choose(HERE, "code") == (None, Match("none", ("no profile for task 'code' fits h100-sxm-80gb",)))
    keep("elsewhere.json", profile(replace(HERE, tokenizer_sha256="x")), age=1)
    chosen, match = choose(HERE, None)
    assert chosen is None
    assert match.reasons == ("no profile for any task fits h100-sxm-80gb", "tokenizer_sha256: tuned on x, here tok")


def test_a_broken_profile_does_not_hide_a_good_one_and_is_named_when_there_is_none() -> None:
    user_profile_folder().mkdir()
    (user_profile_folder() / "broken.json").write_text("{", encoding="utf-8")
    _, match = choose(HERE, None)
    assert match.level == "none"
    assert any("broken.json" in reason for reason in match.reasons)
    keep("good.json", profile(), age=1)
    assert choose(HERE, None)[1].level == "exact"


# at load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def here(folder: Path) -> Here:
    return identify_here(load(str(folder)), None)


def test_P1_no_profile_means_lossless_defaults_said_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lossytune"):
        decoder = Decoder.from_profile("auto", "dialogue", str(folder))
    assert decoder.settings.lossless
    assert decoder.match is not None
    assert decoder.match.level == "none"
    assert [record.message for record in caplog.records if "no profile: lossless defaults" in record.message] != []
    with pytest.raises(ProfileMismatch, match="no profile for task 'dialogue' fits"):
        Decoder.from_profile("auto", "dialogue", str(folder), strict=True)


def test_auto_takes_the_profile_of_this_machine(folder: Path, here: Here, caplog: pytest.LogCaptureFixture) -> None:
    keep("p.json", profile(here, precision=Precisions(target="bf16")), age=0)
    with caplog.at_level(logging.WARNING, logger="lossytune"):
        decoder = Decoder.from_profile("auto", "dialogue", str(folder))
    assert decoder.match == Match("exact", ())
    assert decoder.settings.alpha == 0.3
    assert decoder.sampling.temperature == 0.7
    assert str(decoder.target.model.dtype) == "torch.bfloat16"
    assert caplog.records == []


def test_a_compatible_profile_says_why_in_the_log(
    folder: Path, here: Here, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    write_profile(tmp_path / "p.json", profile(replace(here, versions={"torch": "0.1"})))
    with caplog.at_level(logging.WARNING, logger="lossytune"):
        decoder = Decoder.from_profile(tmp_path / "p.json")
    assert decoder.match is not None
    assert decoder.match.level == "compatible"
    assert "versions.torch: tuned on 0.1" in caplog.text


def test_P5_a_profile_of_another_device_is_refused_and_forced_on_request(
    folder: Path, here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = profile(replace(here, device=here.device.model_copy(update={"name": "abacus-1gb"})))
    with pytest.raises(ProfileMismatch, match=r"device\.name: tuned on abacus-1gb, here .*--allow-mismatch") as caught:
        Decoder.from_profile(foreign)
    assert caught.value.exit_code == 6
    with caplog.at_level(logging.WARNING, logger="lossytune"):
        decoder = Decoder.from_profile(foreign, allow_mismatch=True)
    assert decoder.match is not None
    assert decoder.match.level == "forced"
    assert any(reason.startswith("device.name") for reason in decoder.match.reasons)
    assert "is forced here" in caplog.text
    assert decoder.settings == foreign.settings


def test_a_profile_of_other_weights_is_refused_although_the_folder_is_the_same(folder: Path, here: Here) -> None:
    other = replace(here, target=here.target.model_copy(update={"weights_sha256": "0" * 64}))
    with pytest.raises(ProfileMismatch, match=r"target\.weights_sha256: tuned on 0{12}\.\., "):
        Decoder.from_profile(profile(other))
