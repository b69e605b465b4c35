"""`Decoder`: prompts in, texts out, and the profile that its settings come from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny, tiny_tokenizer
from test_decoding import hf_greedy, lively_model, perturbed

from lossyspec.answers import Generation, Piece
from lossyspec.decoder import Decoder, identify_here
from lossyspec.drafting import ModelDraft
from lossyspec.errors import ConfigurationError, ProfileMismatch
from lossyspec.guard import Guard
from lossyspec.loading import LoadedModel, load
from lossyspec.ngram_drafting import NgramDraft
from lossyspec.profile import Evidence, MatchFields, Profile, Provenance, user_profile_folder, write_profile
from lossyspec.prompts import prompt_ids
from lossyspec.records import Estimate, Quality
from lossyspec.settings import NgramSettings, Precisions, Sampling, Settings

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}w9"


def loaded(model: Any, template: str | None = None) -> LoadedModel:
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return LoadedModel(model, tokenizer, {}, "fp32")


def make_decoder(draft: bool = True, template: str | None = None, **more: Any) -> Decoder:
    model = lively_model("llama")
    decoder = Decoder(loaded(model, template), loaded(perturbed(model), template) if draft else None, **more)
    decoder.eos_ids = frozenset()
    return decoder


def texts(generation: Generation) -> list[str]:
    return [completion.text for completion in generation]


# --- prompts ---


def test_a_string_is_one_prompt_and_a_list_is_a_batch() -> None:
    decoder = make_decoder()
    one = decoder.generate("w1 w2 w3", 8, temperature=0.0)
    assert len(one) == 1
    many = decoder.generate(["w4", "w1 w2 w3", "w7 w8"], 8, temperature=0.0)
    assert len(many) == 3
    assert many[1] == one[0]
    assert [answer.prompt_tokens for answer in many] == [1, 3, 2]
    assert one[0].tokens == hf_greedy(decoder.target.model, [4, 5, 6], 8)
    assert one[0].text == decoder.tokenizer.decode(one[0].tokens, skip_special_tokens=True)
    assert one[0].finish_reason == "length"
    assert many.stats.rows == 3
    assert many.stats.tokens == 24


def test_no_prompts_give_no_answers() -> None:
    decoder = make_decoder()
    assert len(decoder.generate([])) == 0
    assert len(decoder.generate_ids([])) == 0


def test_messages_go_through_the_chat_template_and_a_string_is_one_user_message() -> None:
    decoder = make_decoder(template=TEMPLATE)
    messages = [{"role": "user", "content": "w1 w2"}]
    assert prompt_ids(decoder.tokenizer, messages) == [2, 4, 5, 12]
    assert prompt_ids(decoder.tokenizer, "w1 w2") == [2, 4, 5, 12]
    talk = [*messages, {"role": "assistant", "content": "w5"}, {"role": "user", "content": "w6"}]
    assert prompt_ids(decoder.tokenizer, talk) == [2, 4, 5, 2, 8, 2, 9, 12]
    single = decoder.generate(messages, 6, temperature=0.0)
    assert len(single) == 1
    batch = decoder.generate([talk, messages, "w1 w2"], 6, temperature=0.0)
    assert batch[1] == batch[2] == single[0]
    assert batch[0].tokens == hf_greedy(decoder.target.model, [2, 4, 5, 2, 8, 2, 9, 12], 6)


def test_a_string_without_a_template_is_plain_text() -> None:
    assert prompt_ids(tiny_tokenizer(), "w1 w2") == [4, 5]


def test_messages_without_a_template_are_refused() -> None:
    decoder = make_decoder()
    with pytest.raises(ConfigurationError, match="no chat template: give prompts as plain strings"):
        decoder.generate([{"role": "user", "content": "w1"}])
    with pytest.raises(ConfigurationError, match="no chat template"):
        list(decoder.stream([{"role": "user", "content": "w1"}]))


def test_a_prompt_without_tokens_is_refused() -> None:
    decoder = make_decoder()
    for prompts in ("", ["w1", ""], ["w1", "   "]):
        with pytest.raises(ConfigurationError, match=r"has no tokens; it must have at least one"):
            decoder.generate(prompts)
    with pytest.raises(ConfigurationError, match="has no tokens"):
        list(decoder.stream(""))
    empty = make_decoder(template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ConfigurationError, match="has no tokens"):
        empty.generate([{"role": "user", "content": ""}])
    with pytest.raises(ConfigurationError, match="prompt 1 has no tokens"):
        decoder.generate_ids([[3], []])


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("token", [101, -1])
def test_a_prompt_with_an_unknown_token_is_refused(draft: bool, token: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"prompt 1 holds the token id {token}; allowed: 0 to 100"):
        make_decoder(draft).generate_ids([[3, 4], [3, token, 4, 3, token]])


def test_a_text_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"need 2051 positions; the target model has 2048"):
        make_decoder().generate("w1 w2 w3", 2048)


# --- texts ---


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("stop", [(), ("w8",), ("w7", "2 w")])
def test_the_pieces_of_a_stream_join_to_the_generated_text(draft: bool, alpha: float, stop: tuple[str, ...]) -> None:
    decoder = make_decoder(draft, settings=Settings(alpha=alpha, draft_length=4))
    for seed in range(4):
        options: dict[str, Any] = {"seed": seed, "stop": stop, "temperature": 0.8}
        answer = decoder.generate("w1 w2 w1 w2", 24, **options)
        pieces = list(decoder.stream("w1 w2 w1 w2", 24, **options))
        assert "".join(piece.text for piece in pieces) == answer[0].text
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert all(piece.text for piece in pieces[:-1])
        assert pieces[-1].finish_reason == answer[0].finish_reason
        assert pieces[-1].stats is not None
        assert pieces[-1].stats.tokens == len(answer[0].tokens)
        assert not any(part in answer[0].text for part in stop)


def test_a_stream_shows_a_text_while_it_grows() -> None:
    decoder = make_decoder(settings=Settings(draft_length=2))
    pieces = list(decoder.stream("w1 w2", 30, temperature=0.0))
    assert len(pieces) > 8
    assert isinstance(pieces[0], Piece)


def test_an_abandoned_stream_leaves_the_decoder_usable() -> None:
    decoder = make_decoder()
    expected = decoder.generate("w5 w6", 12, temperature=0.0)
    next(decoder.stream("w1 w2 w3 w4", 24, seed=0))
    assert texts(decoder.generate("w5 w6", 12, temperature=0.0)) == texts(expected)


def test_stop_may_be_one_string() -> None:
    decoder = make_decoder()
    text = decoder.generate("w1 w2", 12, temperature=0.0)[0].text
    word = text.split(" ")[4]
    one = decoder.generate("w1 w2", 12, temperature=0.0, stop=word)[0]
    assert one == decoder.generate("w1 w2", 12, temperature=0.0, stop=[word])[0]
    assert one.text == text[: text.index(word)]
    assert one.finish_reason == "stop"


def test_eos_ends_the_tokens_and_is_not_in_the_text() -> None:
    model = lively_model("llama")
    text = hf_greedy(model, [4, 5], 12)
    model.generation_config.eos_token_id = [text[3], 100_000]
    decoder = Decoder(loaded(model), loaded(model))
    assert decoder.eos_ids == {text[3], 100_000}
    answer = decoder.generate("w1 w2", 12, temperature=0.0)[0]
    assert answer.tokens == text[: text.index(text[3]) + 1]
    assert answer.finish_reason == "stop"
    model.generation_config.eos_token_id = 1
    assert Decoder(loaded(model)).eos_ids == {1}
    model.generation_config.eos_token_id = None
    assert Decoder(loaded(model)).eos_ids == frozenset()


# --- seeds and settings ---


def test_case_23_a_seed_reproduces_the_answers() -> None:
    decoder = make_decoder()
    prompts = ["w1 w2", "w3", "w4 w5 w6"]
    first = decoder.generate(prompts, 16, seed=5)
    assert texts(first) == texts(decoder.generate(prompts, 16, seed=5))
    assert texts(first) != texts(decoder.generate(prompts, 16, seed=6))
    assert texts(decoder.generate(prompts, 16)) != texts(decoder.generate(prompts, 16))  # no seed: a new one each time


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"seed is {seed}; allowed"):
        make_decoder().generate("w1", seed=seed)


def test_the_sampling_of_the_request_overrides_that_of_the_decoder() -> None:
    decoder = make_decoder(sampling=Sampling(temperature=0.9, top_k=50))
    greedy = hf_greedy(decoder.target.model, [4, 5], 16)
    assert decoder.generate("w1 w2", 16, seed=0)[0].tokens != greedy
    assert decoder.generate("w1 w2", 16, seed=0, temperature=0.0)[0].tokens == greedy
    assert decoder.generate("w1 w2", 16, seed=0, top_k=1)[0].tokens == greedy
    assert decoder.generate("w1 w2", 16, seed=0, top_p=1e-6)[0].tokens == greedy
    penalised = hf_greedy(decoder.target.model, [4, 5], 16, repetition_penalty=1.9)
    assert penalised != greedy
    assert decoder.generate("w1 w2", 16, temperature=0.0, repetition_penalty=1.9)[0].tokens == penalised
    assert decoder.sampling == Sampling(temperature=0.9, top_k=50)  # of this request only


def test_a_wrong_sampling_value_names_it_and_what_is_allowed() -> None:
    decoder = make_decoder()
    with pytest.raises(ConfigurationError, match=r"temperature is -1"):
        decoder.generate("w1", temperature=-1)
    with pytest.raises(ConfigurationError, match=r"unknown key 'temprature'.*'temperature'"):
        decoder.generate("w1", temprature=0.5)
    with pytest.raises(ConfigurationError, match="max_new_tokens is 0"):
        decoder.generate("w1", 0)


def test_case_25_the_settings_of_the_request_override_those_of_the_decoder() -> None:
    decoder = make_decoder(settings=Settings(alpha=1.0, draft_length=4), sampling=Sampling(temperature=0.0))
    greedy = hf_greedy(decoder.target.model, [4, 5], 16)
    assert decoder.generate("w1 w2", 16)[0].tokens != greedy
    assert decoder.generate("w1 w2", 16, settings=Settings(alpha=0.0))[0].tokens == greedy
    plain = decoder.generate("w1 w2", 16, settings=Settings(draft_length=0))
    assert plain.stats.drafted == 0
    assert decoder.settings.alpha == 1.0


def test_the_default_settings_are_lossless_prompt_lookup() -> None:
    decoder = Decoder(loaded(lively_model("llama")))
    assert decoder.settings.lossless
    assert decoder.settings.draft_length > 0
    assert isinstance(decoder.draft, NgramDraft)
    assert decoder.match is None


def test_processors_reach_the_decoder() -> None:
    decoder = make_decoder()

    def only_even(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 1::2] = -torch.inf
        return scores

    answer = decoder.generate("w1 w2", 16, seed=0, processors=[only_even])
    assert all(token % 2 == 0 for token in answer[0].tokens)
    streamed = "".join(piece.text for piece in decoder.stream("w1 w2", 16, seed=0, processors=[only_even]))
    assert streamed == answer[0].text


# --- from a profile ---


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a draft with the same tokenizer, and another target."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("target", "draft", "other"))}


def tuned_profile(
    target: Path,
    draft: Path | None = None,
    settings: Settings | None = None,
    task: str = "dialogue",
    change: dict[str, Any] | None = None,
    spread: float | None = None,
) -> Profile:
    """A profile for this machine and these models. change: fields of `match` that differ."""
    here = identify_here(load(str(target)), load(str(draft), role="draft") if draft else None)
    match = {
        "device": here.device,
        "target": here.target,
        "draft": here.draft,
        "tokenizer_sha256": here.tokenizer_sha256,
        "versions": here.versions,
        **(change or {}),
    }
    one = Estimate(value=1.5, ci95=(1.4, 1.6))
    quality = Quality(
        perplexity_ratio=Estimate(value=1.02),
        tokens=1000,
        texts=10,
        corpus="references",
        tv=0.02,
        kl_forward=0.02,
        kl_reverse=None,
        certificate=None,
        tv_spread=spread,
    )
    return Profile(
        created="2026-01-01T00:00:00Z",
        task=task,
        match=MatchFields(**match),
        settings=settings or Settings(alpha=0.0, theta=0.0, tau=0.8, draft_length=3),
        sampling=Sampling(temperature=0.7, top_k=40),
        evidence=Evidence(
            batch_size=1,
            speedup=one,
            lossless_speedup=None,
            predicted_speedup=None,
            plain_tokens_per_s=100.0,
            transformers_tokens_per_s=None,
            quality=quality,
            tokens_per_round=2.0,
            acceptance=0.6,
            length_ratio=None,
            ttft_ms=None,
            itl_ms=None,
            memory_peak_bytes=None,
        ),
        provenance=Provenance(
            versions={}, sampler="tpe", seed=0, trials={"complete": 1}, workload={}, max_quality_loss=0.05
        ),
    )


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_exact_profile_is_used_in_silence(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    written = write_profile(path, tuned_profile(folders["target"], folders["draft"]))
    for profile in (path, str(path), written):
        decoder = Decoder.from_profile(profile)
        assert decoder.match is not None
        assert decoder.match.level == "exact"
        assert decoder.match.reasons == ()
        assert decoder.settings == Settings(alpha=0.0, theta=0.0, tau=0.8, draft_length=3)
        assert decoder.sampling == Sampling(temperature=0.7, top_k=40)
        assert isinstance(decoder.draft, ModelDraft)
    assert warnings_of(caplog) == []
    assert decoder.generate("w1 w2", 8, seed=0).stats.drafted > 0


def test_a_profile_brings_its_guard(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = tuned_profile(folders["target"], folders["draft"], Settings(alpha=0.5, draft_length=3), spread=0.1)
    band, own = Guard.of(profile.evidence), Guard(request=0.3)
    assert band is not None and band.request is not None
    assert Decoder.from_profile(profile).watch.guard == band
    assert Decoder.from_profile(profile, guard=own).watch.guard == own
    assert Decoder.from_profile(profile, guard=None).watch.guard == Guard()
    assert Decoder.from_profile(tuned_profile(folders["target"])).watch.guard == Guard()
    monkeypatch.setenv("LOSSYTUNE_PROFILES", str(tmp_path))
    write_profile(tmp_path / "profile.json", profile)
    found = Decoder.from_profile("auto", target=str(folders["target"]), draft=str(folders["draft"]))
    assert found.watch.guard == band
    assert found.counters.snapshot()["profile"] == {"exact": 1}


def test_a_profile_with_prompt_lookup_loads_no_draft(folders: dict[str, Path]) -> None:
    settings = Settings(ngram=NgramSettings(min_match=2, max_match=3))
    decoder = Decoder.from_profile(tuned_profile(folders["target"], settings=settings))
    assert isinstance(decoder.draft, NgramDraft)
    assert decoder.settings.ngram == NgramSettings(min_match=2, max_match=3)


def test_another_version_is_compatible_and_said_in_the_log(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    decoder = Decoder.from_profile(tuned_profile(folders["target"], change={"versions": {"torch": "1.0"}}))
    assert decoder.match is not None
    assert decoder.match.level == "compatible"
    (said,) = warnings_of(caplog)
    assert "is compatible here: versions.torch: tuned on 1.0, here " in said


def test_a_profile_of_something_else_is_refused_with_the_fields_that_differ(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    right = tuned_profile(folders["target"])
    device = right.match.device.model_copy(update={"name": "a-machine-far-away"})
    target = right.match.target.model_copy(update={"weights_sha256": "0" * 64})
    profile = tuned_profile(folders["target"], change={"device": device, "target": target})
    with pytest.raises(ProfileMismatch) as refused:
        Decoder.from_profile(profile)
    message = str(refused.value)
    assert f"device.name: tuned on a-machine-far-away, here {right.match.device.name}" in message
    assert f"target.weights_sha256: tuned on {'0' * 12}.., here {right.match.target.weights_sha256[:12]}.." in message
    assert "config_sha256" not in message
    assert "allow_mismatch=True" in message
    assert warnings_of(caplog) == []
    forced = Decoder.from_profile(profile, allow_mismatch=True)
    assert forced.match is not None
    assert forced.match.level == "forced"
    assert len(forced.match.reasons) == 2
    (said,) = warnings_of(caplog)
    assert "is forced here: device.name" in said


def test_auto_takes_the_profile_that_fits_these_models_and_this_task(folders: dict[str, Path]) -> None:
    place = user_profile_folder()
    right = write_profile(place / "right.json", tuned_profile(folders["target"], folders["draft"]))
    write_profile(place / "code.json", tuned_profile(folders["target"], folders["draft"], Settings(draft_length=7), "code"))
    write_profile(place / "other.json", tuned_profile(folders["other"], folders["draft"], Settings(draft_length=9)))
    write_profile(place / "ngram.json", tuned_profile(folders["target"], None, Settings(draft_length=5)))
    models = {"target": str(folders["target"]), "draft": str(folders["draft"])}
    decoder = Decoder.from_profile("auto", task="dialogue", **models)
    assert decoder.settings == right.settings
    assert decoder.match is not None
    assert decoder.match.level == "exact"
    assert Decoder.from_profile("auto", "code", **models).settings.draft_length == 7
    assert Decoder.from_profile("auto", "dialogue", str(folders["target"])).settings.draft_length == 5
    assert Decoder.from_profile("auto", "dialogue", str(folders["other"]), models["draft"]).settings.draft_length == 9


def test_auto_prefers_exact_over_compatible(folders: dict[str, Path]) -> None:
    place = user_profile_folder()
    write_profile(place / "a.json", tuned_profile(folders["target"], settings=Settings(draft_length=2)))
    write_profile(
        place / "b.json",
        tuned_profile(folders["target"], settings=Settings(draft_length=6), change={"versions": {"torch": "1.0"}}),
    )
    assert Decoder.from_profile("auto", target=str(folders["target"])).settings.draft_length == 2
    (place / "a.json").unlink()
    decoder = Decoder.from_profile("auto", target=str(folders["target"]))
    assert decoder.settings.draft_length == 6
    assert decoder.match is not None
    assert decoder.match.level == "compatible"


def test_case_p1_auto_without_a_match_is_lossless_and_says_so(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    decoder = Decoder.from_profile("auto", task="dialogue", target=str(folders["target"]))
    assert decoder.settings.lossless
    assert decoder.match is not None
    assert decoder.match.level == "none"
    (said,) = warnings_of(caplog)
    assert said.startswith("no profile: lossless defaults (no profile for task 'dialogue' fits ")
    with pytest.raises(ProfileMismatch, match="no profile for task 'dialogue' fits"):
        Decoder.from_profile("auto", task="dialogue", target=str(folders["target"]), strict=True)


def test_auto_names_what_differs_and_an_unreadable_profile(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    place = user_profile_folder()
    write_profile(place / "other.json", tuned_profile(folders["other"]))
    Decoder.from_profile("auto", target=str(folders["target"]))
    (said,) = warnings_of(caplog)
    assert "target.weights_sha256: tuned on " in said
    caplog.clear()
    (place / "broken.json").write_text('{"schema": "lossytune.profile/1", "task": 3}')
    Decoder.from_profile("auto", target=str(folders["target"]))
    (said,) = warnings_of(caplog)
    assert "broken.json" in said


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("draft_precision", ["fp32", None])
def test_a_profile_brings_its_precision(folders: dict[str, Path], auto: bool, draft_precision: Any) -> None:
    """A draft without a precision of its own takes the target's."""
    settings = Settings(precision=Precisions(target="bf16", draft=draft_precision))
    profile = tuned_profile(folders["target"], folders["draft"], settings)
    if auto:
        write_profile(user_profile_folder() / "bf16.json", profile)
        decoder = Decoder.from_profile("auto", target=str(folders["target"]), draft=str(folders["draft"]))
    else:
        decoder = Decoder.from_profile(profile)
    assert decoder.target.model.dtype == torch.bfloat16
    assert isinstance(decoder.draft, ModelDraft)
    assert decoder.draft.runner.model.dtype == (torch.float32 if draft_precision else torch.bfloat16)


def test_a_missing_or_changed_profile_file_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.json: no such file"):
        Decoder.from_profile(tmp_path / "nowhere.json")
    path = tmp_path / "profile.json"
    write_profile(path, tuned_profile(folders["target"]))
    path.write_text(path.read_text().replace('"tau": 0.8', '"tau": 0.9'))
    with pytest.raises(ConfigurationError, match="changed after it was written"):
        Decoder.from_profile(path)


def test_case_25_zeros_survive_a_profile_file(folders: dict[str, Path], tmp_path: Path) -> None:
    settings = Settings(alpha=0.0, theta=0.0, draft_length=0)
    profile = tuned_profile(folders["target"], settings=settings).model_copy(update={"sampling": Sampling(temperature=0.0)})
    path = tmp_path / "profile.json"
    write_profile(path, profile)
    decoder = Decoder.from_profile(path)
    assert (decoder.settings.alpha, decoder.settings.theta, decoder.settings.draft_length) == (0.0, 0.0, 0)
    assert decoder.sampling.temperature == 0.0
    assert decoder.generate("w1 w2", 8, seed=0)[0].tokens == decoder.generate("w1 w2", 8, seed=1)[0].tokens
