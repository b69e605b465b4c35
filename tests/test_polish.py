"""The polish pass: what it looks at, that its likelihoods are exact, that only what the target prefers is kept."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import make_decoder
from test_decoding import hf_greedy, lively_model

from lossyspec.answers import Completion
from lossyspec.correctors import Seq2SeqCorrector, TargetCorrector, load_corrector, sentence_around
from lossyspec.decoder import Decoder
from lossyspec.errors import ConfigurationError
from lossyspec.polish import Candidate, Polisher, PolishSettings, Scorer, Span, doubtful_spans, edit_distance
from lossyspec.runner import Runner
from lossyspec.settings import Settings

PROMPT = [4, 5, 6]


@torch.inference_mode()
def uncached(model: Any, output: list[int]) -> torch.Tensor:
    """log p of each output token, by one pass without a cache."""
    logits = model(input_ids=torch.tensor([[*PROMPT, *output]]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1)[range(len(output)), output]


def answer_of(decoder: Decoder, tokens: list[int], relaxed: list[bool] | None = None) -> Completion:
    text = decoder.tokenizer.decode(tokens, skip_special_tokens=True)
    return Completion(text, tokens, len(PROMPT), "length", tuple(relaxed or [True] * len(tokens)))


class Says:
    """A corrector that puts given tokens in the place of a span."""

    def __init__(self, new: list[int]) -> None:
        self.new, self.asked = new, list[tuple[int, int]]()

    def propose(self, scorer: Scorer, output: list[int], span: Span) -> Candidate:
        self.asked.append((span.start, span.end))
        tokens = [*output[: span.start], *self.new, *output[span.end :]]
        return Candidate(tokens, span.first, scorer.text(output[span.start : span.end]), scorer.text(self.new))


# --- the parts ---


def test_the_scores_are_those_of_a_pass_without_a_cache_whatever_was_scored_before() -> None:
    model = lively_model("llama")
    scorer, generator = Scorer(Runner(model), PROMPT, tiny_tokenizer(), frozenset()), torch.Generator().manual_seed(0)
    output: list[int] = []
    for turn in range(12):
        keep = int(torch.randint(0, len(output) + 1, (1,), generator=generator))
        output = output[:keep] + torch.randint(3, 101, (1 + turn,), generator=generator).tolist()
        torch.testing.assert_close(scorer.log_probabilities(output), uncached(model, output), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(scorer.log_probabilities(output[:-1]), uncached(model, output)[:-1], rtol=1e-3, atol=1e-4)
        if turn % 3 == 0:
            assert scorer.most_likely(output, 4) == hf_greedy(model, [*PROMPT, *output], 4)
            assert scorer.most_likely([], 2) == hf_greedy(model, PROMPT, 2)


def test_long_outputs_are_scored_in_pieces() -> None:
    model = lively_model("llama")
    output = torch.randint(3, 101, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    scorer = Scorer(Runner(model), PROMPT, tiny_tokenizer(), frozenset())
    torch.testing.assert_close(scorer.log_probabilities(output), uncached(model, output), rtol=1e-3, atol=1e-3)


@settings(deadline=None, max_examples=80)
@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_the_edit_distance_is_the_least_number_of_changes(one: str, other: str) -> None:
    @cache
    def least(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        return min(least(i - 1, j) + 1, least(i, j - 1) + 1, least(i - 1, j - 1) + (one[i - 1] != other[j - 1]))

    assert edit_distance(one, other) == least(len(one), len(other))
    assert edit_distance("kitten", "sitting") == 3


def test_only_relaxed_tokens_of_low_probability_are_looked_at() -> None:
    scorer = Scorer(Runner(lively_model("llama")), PROMPT, tiny_tokenizer(), frozenset({1}))
    output = [3, 4, 5, 6, 7, 8, 1]
    logs = torch.tensor([0.01, 0.9, 0.01, 0.02, 0.01, 0.01, 0.01]).log()
    relaxed = [True, True, True, True, False, True, True]  # the last token is the end of the text
    spans = doubtful_spans(scorer, output, relaxed, logs, 0.05)
    assert [(span.start, span.end) for span in spans] == [(0, 1), (2, 4), (5, 6)]
    text = scorer.text(output)
    assert [text[span.first : span.last].strip() for span in spans] == ["w0", "w2 w3", "w5"]
    assert doubtful_spans(scorer, output, relaxed, logs, 0.015)[1].end == 3
    assert doubtful_spans(scorer, output, [False] * 7, logs, 0.05) == []


@pytest.mark.parametrize(
    ("text", "part", "sentence"),
    [
        ("One here. Two there! Three.", "there", "Two there!"),
        ("One here. Two there! Three.", "One", "One here."),
        ("One here. Two there! Three", "Three", "Three"),
        ("It is 3.5 m. Yes.", "is", "It is 3.5 m."),
        ("一つ。二つ。", "二つ", "二つ。"),
        ("a. b c. d", "b c. d", "b c. d"),
        ("no end", "end", "no end"),
    ],
)
def test_the_sentence_around_a_span(text: str, part: str, sentence: str) -> None:
    first = text.index(part)
    begin, end = sentence_around(text, first, first + len(part))
    assert text[begin:end] == sentence


# --- the pass ---


def test_lossy_answers_get_likelier_and_change_only_where_they_were_relaxed_and_unlikely() -> None:
    decoder, edits = make_decoder(settings=Settings(alpha=1.0, draft_length=4)), 0
    knobs = PolishSettings(floor=0.2, most_changed=40, least_gain_nats=0.25)
    polisher = Polisher(decoder, TargetCorrector(), knobs)
    for seed in range(6):
        answer = decoder.generate_ids([PROMPT], 24, seed=seed, temperature=1.0)[0]
        assert len(answer.relaxed) == 24 and 0 < sum(answer.relaxed) < 24
        logs = uncached(decoder.target.model, answer.tokens)
        polished = polisher.polish_ids(PROMPT, answer)
        after = uncached(decoder.target.model, polished.tokens)
        assert polished.log_likelihood == pytest.approx((float(logs.sum()), float(after.sum())), abs=1e-2)
        gains = sum(edit.gain_nats for edit in polished.edits)
        assert gains == pytest.approx(float(after.sum() - logs.sum()), abs=1e-2)
        assert all(edit.gain_nats > 0.25 and edit_distance(edit.before, edit.after) <= 40 for edit in polished.edits)
        assert len(polished.tokens) == 24
        for place, (old, new) in enumerate(zip(answer.tokens, polished.tokens, strict=True)):
            assert old == new or (answer.relaxed[place] and float(logs[place].exp()) < 0.2)
        assert polished.text == decoder.tokenizer.decode(polished.tokens, skip_special_tokens=True)
        text = answer.text
        for edit in reversed(polished.edits):  # the report is the change
            begin = edit.first + (text[edit.first] == " ")
            assert text[begin:].startswith(edit.before)
            text = text[:begin] + edit.after + text[begin + len(edit.before) :]
        assert text == polished.text
        assert polished.tried >= len(polished.edits)
        edits += len(polished.edits)
    assert edits >= 6


@pytest.mark.parametrize(
    "knobs", [Settings(alpha=0.0), Settings(alpha=0.8, draft_length=0), Settings(alpha=0.8, rule="exact")]
)
def test_a_lossless_answer_is_left_alone(knobs: Settings) -> None:
    decoder = make_decoder(settings=knobs)
    answer = decoder.generate_ids([PROMPT], 24, seed=0)[0]
    assert answer.relaxed == (False,) * 24
    polished = Polisher(decoder, TargetCorrector(), PolishSettings(floor=1.0)).polish_ids(PROMPT, answer)
    assert (polished.tokens, polished.text, polished.edits, polished.tried) == (answer.tokens, answer.text, (), 0)


def test_an_edit_that_the_target_does_not_prefer_or_that_changes_too_much_is_dropped() -> None:
    decoder = make_decoder()
    best = hf_greedy(decoder.target.model, PROMPT, 10)
    wrong = 3 + (best[4] - 2) % 90
    worse = [*best[:4], wrong, *best[5:]]
    assert uncached(decoder.target.model, worse).sum() < uncached(decoder.target.model, best).sum() - 1
    relaxed = [place == 4 for place in range(10)]
    back, on = answer_of(decoder, worse, relaxed), answer_of(decoder, best, relaxed)
    kept = Polisher(decoder, Says([best[4]]), PolishSettings(floor=1.0)).polish_ids(PROMPT, back)
    assert (kept.tokens, kept.tried, len(kept.edits)) == (best, 1, 1)
    dropped = Polisher(decoder, Says([wrong]), PolishSettings(floor=1.0)).polish_ids(PROMPT, on)
    assert (dropped.tokens, dropped.tried, dropped.edits) == (best, 1, ())
    changed = edit_distance(decoder.tokenizer.decode([wrong]), decoder.tokenizer.decode([best[4]]))
    for most, length in ((changed, 1), (changed - 1, 0)):
        if most:
            knobs = PolishSettings(floor=1.0, most_changed=most)
            assert len(Polisher(decoder, Says([best[4]]), knobs).polish_ids(PROMPT, back).edits) == length
    gain = kept.edits[0].gain_nats
    high = PolishSettings(floor=1.0, least_gain_nats=gain + 0.01)
    assert Polisher(decoder, Says([best[4]]), high).polish_ids(PROMPT, back).edits == ()


def test_leaving_words_out_is_no_gain_by_itself() -> None:
    """Fewer tokens are likelier together; they must be likelier each, too."""
    decoder, found = make_decoder(), 0
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        output = torch.randint(3, 101, (12,), generator=generator).tolist()
        shorter = [*output[:5], *output[7:]]
        old, new = uncached(decoder.target.model, output), uncached(decoder.target.model, shorter)
        relaxed = [place in (5, 6) for place in range(12)]
        knobs = PolishSettings(floor=1.0, most_changed=99, least_gain_nats=0.0)
        polished = Polisher(decoder, Says([]), knobs).polish_ids(PROMPT, answer_of(decoder, output, relaxed))
        assert bool(polished.edits) == bool(new.sum() > old.sum() and new.mean() > old.mean())
        found += bool(new.sum() > old.sum()) and not polished.edits
    assert found


def test_the_end_of_the_text_and_a_stop_string_stay() -> None:
    decoder = make_decoder()
    decoder.eos_ids = frozenset({1})
    tokens = [30, 40, 50, 1]
    says = Says([31])
    polished = Polisher(decoder, says, PolishSettings(floor=1.0)).polish_ids(PROMPT, answer_of(decoder, tokens))
    assert polished.tokens[-1] == 1 and says.asked == [(0, 3)]
    stopped = Completion("w27 w37", [30, 40, 50], 3, "stop", (True,) * 3)  # w47 is the stop string
    says = Says([31])
    Polisher(decoder, says, PolishSettings(floor=1.0)).polish_ids(PROMPT, stopped)
    assert says.asked == []  # the span reaches into it


def test_wrong_settings_name_the_value_and_what_is_allowed() -> None:
    with pytest.raises(ConfigurationError, match="floor is 0; allowed: over 0, at most 1"):
        PolishSettings(floor=0)
    with pytest.raises(ConfigurationError, match="most_changed is 0; it must be at least 1"):
        PolishSettings(most_changed=0)
    with pytest.raises(ConfigurationError, match="least_gain_nats is nan"):
        PolishSettings(least_gain_nats=float("nan"))


# --- a seq2seq model ---


def tiny_t5() -> Any:
    import transformers as t

    config = t.T5Config(
        vocab_size=101, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    model = t.T5ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # as it is initialised, it says nothing but padding
        for weights in model.parameters():
            if weights.ndim >= 2:
                weights.copy_(torch.randn(weights.shape, generator=generator) / weights.shape[-1] ** 0.5)
    return model


def test_a_random_t5_proposes_sentences_and_only_what_the_target_prefers_is_kept() -> None:
    decoder = make_decoder(settings=Settings(alpha=1.0, draft_length=4))
    corrector = Seq2SeqCorrector(tiny_t5(), tiny_tokenizer(), most_tokens=12)
    polisher = Polisher(decoder, corrector, PolishSettings(floor=0.5, most_changed=200))
    proposed = 0
    for seed in range(3):
        answer = decoder.generate_ids([PROMPT], 16, seed=seed, temperature=1.0)[0]
        polished = polisher.polish_ids(PROMPT, answer)
        old, new = uncached(decoder.target.model, answer.tokens), uncached(decoder.target.model, polished.tokens)
        assert float(new.sum()) >= float(old.sum()) - 1e-3
        assert (polished.text == answer.text) == (polished.edits == ())
        proposed += polished.tried
    assert proposed == 3  # one sentence each


def test_a_rewritten_sentence_is_put_in_its_place_and_encoded_anew() -> None:
    decoder = make_decoder()
    best = hf_greedy(decoder.target.model, PROMPT, 8)
    worse = [*best[:3], 3 + (best[3] - 2) % 90, *best[4:]]
    corrector = Seq2SeqCorrector(tiny_t5(), tiny_tokenizer(), template="fix: {text}")
    answer = answer_of(decoder, worse, [place == 3 for place in range(8)])
    read = []

    def rewrite(sentence: str) -> str:
        read.append(sentence)
        return str(decoder.tokenizer.decode(best))

    corrector.rewrite = rewrite  # type: ignore[method-assign]
    polished = Polisher(decoder, corrector, PolishSettings(floor=1.0)).polish_ids(PROMPT, answer)
    assert read == [answer.text]
    assert polished.tokens == best
    assert [(edit.first, edit.before, edit.after) for edit in polished.edits] == [(0, answer.text, polished.text)]


def test_any_encoder_decoder_checkpoint_loads_and_others_are_refused(tmp_path: Path) -> None:
    tiny_t5().save_pretrained(tmp_path / "t5")
    tiny_tokenizer().save_pretrained(tmp_path / "t5")
    corrector = load_corrector(str(tmp_path / "t5"), "fix: {text}")
    assert isinstance(corrector.rewrite("w1 w2"), str)
    decoder_only = save_tiny(tmp_path / "llama")
    with pytest.raises(ConfigurationError, match=r"cannot load the corrector .*llama.*allowed: an encoder-decoder model"):
        load_corrector(str(decoder_only))
    with pytest.raises(ConfigurationError, match=r"template is 'fix:'; it must hold \{text\}"):
        load_corrector(str(tmp_path / "t5"), "fix:")
