"""A draft with another tokenizer: what is shared, that q is the draft's own on the text, that the target's law is whole."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer
from test_decoding import LawRunner, chi_square_p, hf_greedy, histogram, lively_model, outputs, run

from lossyspec.acceptance import residual, verify
from lossyspec.decoder import Decoder
from lossyspec.drafting import ModelDraft, Request
from lossyspec.drafts import make_draft
from lossyspec.errors import ConfigurationError
from lossyspec.loading import LoadedModel
from lossyspec.runner import Runner
from lossyspec.sampling import Choice
from lossyspec.settings import PRINCIPLED_RULES, Sampling, Settings
from lossyspec.text_drafting import TextDraft, make_text_draft
from lossyspec.tuner.trace import Texts, Tracer
from lossyspec.vocabulary import Translator, shared_tokens, token_texts


def pair_tokenizer(*merges: tuple[str, str], letters: str = "abc", bos: bool = False) -> Any:
    """Byte-pair encoding over a few letters; ids: </s>, the letters, the merges in order."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    words = ["</s>", *letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, list(merges)))
    backend.decoder = decoders.Fuse()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="</s>" if bos else None)


#: the draft reads "ab" as a, b until a c follows: then the earlier tokens change to a, bc
TARGET = pair_tokenizer(("a", "b"), ("c", "c"), ("ab", "cc"))
DRAFT = pair_tokenizer(("b", "c"), ("a", "bc"), ("c", "c"), ("b", "a"), letters="cba")
SIZES = (7, 8)


def tiny_pair(architecture: str = "llama") -> tuple[LoadedModel, LoadedModel]:
    target = lively_model(architecture, vocab_size=SIZES[0], spread=2.0)
    draft = lively_model("llama", seed=1, vocab_size=SIZES[1], spread=1.0)
    return LoadedModel(target, TARGET, {}, "fp32"), LoadedModel(draft, DRAFT, {}, "fp32")


def tiny_draft() -> tuple[TextDraft, Any]:
    _, draft = tiny_pair()
    return make_text_draft(draft, TARGET, SIZES[0]), draft.model


# --- vocabularies ---


def test_the_shared_tokens_are_those_of_the_same_text() -> None:
    assert token_texts(TARGET) == {1: "a", 2: "b", 3: "c", 4: "ab", 5: "cc", 6: "abcc"}
    shared = shared_tokens(TARGET, DRAFT, *SIZES)
    assert dict(zip(shared.target, shared.draft, strict=True)) == {0: 0, 1: 3, 2: 2, 3: 1, 5: 6}
    fewer = shared_tokens(TARGET, DRAFT, 3, 3)  # ids without logits are left out
    assert dict(zip(fewer.target, fewer.draft, strict=True)) == {0: 0, 2: 2}


def test_a_word_is_the_same_token_whatever_its_mark_for_a_space() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(words: list[str], decoder: Any, before: Any) -> Any:
        backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
        backend.decoder, backend.pre_tokenizer = decoder, before
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    pieces = make(["a", "▁", "▁the", "the", "<0xC3>"], decoders.Metaspace(), pre_tokenizers.Metaspace())
    bytes_ = make(["Ġthe", "the", "Ã", "a", "Ġ"], decoders.ByteLevel(), pre_tokenizers.ByteLevel())
    shared = shared_tokens(pieces, bytes_, 5, 5)
    pairs = dict(zip(shared.target, shared.draft, strict=True))
    assert pairs == {0: 3, 1: 4, 2: 0, 3: 1}  # half a character, or a byte by name, is no text


def test_the_translation_is_the_text_encoded_anew() -> None:
    translate = Translator(TARGET, DRAFT)
    assert translate([4]) == [3, 2]  # ab: a b
    assert translate([4, 3]) == [5]  # ab c: abc, in one
    assert translate([0, 4, 3, 0]) == [5]  # special tokens are no text
    assert translate([0]) == [0]
    assert Translator(TARGET, pair_tokenizer(bos=True))([1]) == [0, 1]


def test_an_unfinished_character_waits() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({"a": 0, "Ã": 1, "©": 2}, []))
    backend.decoder = decoders.ByteLevel()
    translate = Translator(PreTrainedTokenizerFast(tokenizer_object=backend), pair_tokenizer(letters="aé"))
    assert translate([0, 1]) == [1]
    assert translate([0, 1, 2]) == [1, 2]


def test_tokenizers_without_a_common_token_are_refused() -> None:
    draft = LoadedModel(lively_model("llama", vocab_size=4), pair_tokenizer(letters="xyz"), {}, "fp32")
    with pytest.raises(ConfigurationError, match="target and draft have 1 tokens in common; at least 2 are needed"):
        make_text_draft(draft, TARGET, SIZES[0])


def test_a_model_with_the_targets_tokenizer_is_an_ordinary_draft() -> None:
    target, other = tiny_pair()
    assert isinstance(make_draft(LoadedModel(other.model, TARGET, {}, "fp32"), Runner(target.model), 7, TARGET), ModelDraft)
    assert isinstance(make_draft(other, Runner(target.model), 7, TARGET), TextDraft)
    assert isinstance(Decoder(target, other).draft, TextDraft)


# --- the law ---


@torch.inference_mode()
def fresh_q(model: Any, tokens: list[int], tau: float) -> torch.Tensor:
    """The draft's law over the target's tokens, without a cache: renormalised on what both have."""
    logits = model(input_ids=torch.tensor([Translator(TARGET, DRAFT)(tokens)]), use_cache=False).logits[0, -1]
    shared = shared_tokens(TARGET, DRAFT, *SIZES)
    q = torch.zeros(SIZES[0])
    q[list(shared.target)] = (logits[list(shared.draft)] / tau).softmax(-1)
    return q


def test_q_is_the_drafts_own_on_the_text_also_where_reading_changes_earlier_tokens() -> None:
    draft, model = tiny_draft()
    rows = [[1, 4, 3], [4], [2, 2, 2, 6, 1, 2, 3, 3], [0, 5]]
    draft.start(rows, 64)
    generator = torch.Generator().manual_seed(0)
    changed = 0
    for turn in range(7):
        request = Request(rows, [4] * len(rows), Settings(tau=0.8), [Choice(Sampling(), generator)] * len(rows))
        proposal = draft.propose(request)
        assert proposal.q is not None and proposal.lengths == [4] * len(rows)
        q = proposal.on_all(SIZES[0]).q
        assert q is not None
        for row, prefix in enumerate(rows):
            for column in range(4):
                grown = prefix + proposal.tokens[row, :column].tolist()
                torch.testing.assert_close(q[row, column], fresh_q(model, grown, 0.8), rtol=1e-3, atol=1e-5)
                one, two = draft._translate(grown), draft._translate([*grown, int(proposal.tokens[row, column])])
                changed += two[: len(one)] != one
        keep = torch.randint(0, 5, (len(rows),), generator=generator).tolist()
        rows = [
            [*row, *proposal.tokens[index, : keep[index]].tolist(), 1 + (turn + index) % 6] for index, row in enumerate(rows)
        ]
        if turn == 3:
            draft.select([2, 0])
            rows = [rows[2], rows[0]]
    assert changed > 5


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_greedy_is_token_identical_to_the_target_alone(architecture: str) -> None:
    target, draft = tiny_pair(architecture)
    decoder = Decoder(target, draft)
    decoder.eos_ids = frozenset()
    prompts = [[1, 4, 3], [2], [6, 5, 4, 3, 2, 1, 2, 3]]
    for options in ({}, {"repetition_penalty": 1.4}):
        got = decoder.generate_ids(prompts, 20, settings=Settings(draft_length=4), temperature=0.0, **options)
        assert [one.tokens for one in got] == [hf_greedy(target.model, prompt, 20, **options) for prompt in prompts]
        assert 0 < got.stats.accepted < got.stats.drafted


@pytest.mark.parametrize(
    ("tokens", "new", "expected"),
    [
        ([3], [3, 2, 1, 1], [6]),  # after c: a b c c is one token of the target, which the draft lacks
        ([3], [3, 2], [4]),
        ([1], [2, 1, 1], [2, 5]),  # after a: "abcc" would change the token before, so "bcc" is encoded alone
        ([3], [5, 0], [4, 3, 0]),  # abc, end of text
        ([3], [], []),
        ([0], [0], [0]),
    ],
)
def test_what_the_draft_says_is_encoded_for_the_target(tokens: list[int], new: list[int], expected: list[int]) -> None:
    translate = Translator(TARGET, DRAFT)
    assert translate.back(tokens, translate(tokens), new) == expected


@torch.inference_mode()
def test_lossless_greedy_drafts_are_the_drafts_own_text_up_to_theta_and_the_limit() -> None:
    draft, model = tiny_draft()
    rows, limits = [[3], [1, 4, 3], [2, 2]], [5, 2, 0]
    draft.start(rows, 64)
    choices = [Choice(Sampling(temperature=0.0), torch.Generator().manual_seed(0))] * len(rows)
    for theta in (0.0, 0.5):
        proposal = draft.propose(Request(rows, limits, Settings(theta=theta), choices))
        assert proposal.q is None
        for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            text, new = draft._translate(row), list[int]()
            while len(new) < limit and 0 not in new:
                law = model(input_ids=torch.tensor([text + new]), use_cache=False).logits[0, -1].softmax(-1)
                if float(law.max()) < theta:
                    break
                new.append(int(law.argmax()))
            expected = draft._translate.back(row, text, new)[:limit]
            assert proposal.tokens[index, : proposal.lengths[index]].tolist() == expected
            assert proposal.lengths[index] == len(expected)
    relaxed = draft.propose(Request(rows, limits, Settings(alpha=0.5), choices))
    assert relaxed.lengths == limits  # token by token: replay has the law of what is let through
    assert set(relaxed.tokens.flatten().tolist()) <= set(draft.support.tolist())


def test_a_session_with_such_a_draft_is_the_whole_conversation_anew() -> None:
    decoder = Decoder(*tiny_pair())
    decoder.eos_ids = frozenset()
    chat, said = decoder.session(), [1, 4, 3]
    for _ in range(3):
        answer = chat.generate_ids(said, 8, temperature=0.0)
        assert answer[0].tokens == decoder.generate_ids([said], 8, temperature=0.0)[0].tokens
        said = [*said, *answer[0].tokens, 4, 3]


def test_a_batcher_with_such_a_draft_says_what_plain_decoding_says() -> None:
    decoder = Decoder(*tiny_pair())
    decoder.eos_ids = frozenset()
    prompts = [[1, 4, 3], [4], [2, 2, 2, 6, 1, 2, 3, 3], [0, 5], [3, 4, 1]]
    with decoder.batcher(max_batch=2, max_length=64) as batcher:
        handles = []
        for index, prompt in enumerate(prompts):
            handles.append(batcher.submit_ids(prompt, 4 + 2 * index, temperature=0.0))
            batcher.step()
        sampled = batcher.submit_ids([1, 4, 3], 12, seed=4, alpha=0.5)
        together = [handle.result().tokens for handle in [*handles, sampled]]
    for index, prompt in enumerate(prompts):
        plain = decoder.generate_ids([prompt], 4 + 2 * index, settings=Settings(draft_length=0), temperature=0.0)
        assert together[index] == plain[0].tokens
    with decoder.batcher(max_batch=2, max_length=64) as batcher:
        assert batcher.submit_ids([1, 4, 3], 12, seed=4, alpha=0.5).result().tokens == together[-1]


class TextLawRunner(LawRunner):
    """A draft model with one law everywhere."""

    position_limit = None

    def __init__(self, law: list[float]) -> None:
        super().__init__(law)
        self.cache = SimpleNamespace(capacity=1 << 20)


P = [0.05, 0.3, 0.1, 0.2, 0.15, 0.12, 0.08]  # </s> a b c ab cc abcc
Q = [0.02, 0.3, 0.1, 0.18, 0.1, 0.1, 0.15, 0.05]  # </s> c b a bc abc cc ba


def law_pair() -> tuple[Any, TextDraft, torch.Tensor]:
    shared = shared_tokens(TARGET, DRAFT, *SIZES)
    translate = Translator(TARGET, DRAFT)
    known = cache(lambda tokens: translate(list(tokens)))  # thousands of rows have the same few texts
    draft = TextDraft(TextLawRunner(Q), lambda tokens: known(tuple(tokens)), shared, SIZES[0])  # type: ignore[arg-type]
    q = torch.zeros(SIZES[0])
    q[list(shared.target)] = torch.tensor(Q)[list(shared.draft)]
    return LawRunner(P), draft, q / q.sum()


def test_the_emitted_law_is_the_targets_own_over_100_000_draws() -> None:
    target, draft, _ = law_pair()
    rows, stats = run(target, draft, [[1]] * 20_000, Settings(draft_length=3), Sampling(), new=5)
    emitted = [token for row in outputs(rows) for token in row]
    assert len(emitted) == 100_000
    assert chi_square_p(histogram(emitted, 7), P) > 1e-3
    assert stats.acceptance is not None and 0.3 < stats.acceptance < 0.95
    pairs = [7 * row[1] + row[2] for row in outputs(rows)]  # and one after another
    assert chi_square_p(histogram(pairs, 49), [one * two for one in P for two in P]) > 1e-3


@pytest.mark.parametrize("rule", PRINCIPLED_RULES)
def test_the_emitted_law_of_each_rule_is_that_of_the_renormalised_q(rule: str) -> None:
    target, draft, q = law_pair()
    rows, _ = run(target, draft, [[1]] * 20_000, Settings(rule=rule, alpha=0.6, draft_length=1), Sampling(), new=2)  # type: ignore[arg-type]
    p = torch.tensor(P)
    verdict = verify(rule, p, q, torch.tensor(0.6))
    kept = q * verdict.accept
    law = kept + (1 - kept.sum()) * residual(p, q, verdict)
    assert chi_square_p(histogram([row[0] for row in outputs(rows)], 7), law.tolist()) > 1e-3


# --- the rest ---


def test_a_text_beyond_the_drafts_positions_is_decoded_without_it() -> None:
    target, draft = tiny_pair()
    decoder = Decoder(target, draft)
    decoder.eos_ids = frozenset()
    assert isinstance(decoder.draft, TextDraft)
    decoder.draft.runner.position_limit = 12
    got = decoder.generate_ids([[1, 2, 1]], 30, settings=Settings(draft_length=3), temperature=0.0)
    assert got[0].tokens == hf_greedy(target.model, [1, 2, 1], 30)
    assert 0 < got.stats.drafted < 15
    long = decoder.generate_ids([[1, 2] * 20], 5, settings=Settings(draft_length=3), temperature=0.0)
    assert long[0].tokens == hf_greedy(target.model, [1, 2] * 20, 5)
    assert long.stats.drafted == 0


def test_a_trace_holds_the_law_that_the_draft_has_along_the_text() -> None:
    target, _ = tiny_pair()
    draft, model = tiny_draft()
    prompt, output = [1, 4, 3], [4, 3, 5, 2, 1, 6]
    tracer = Tracer(Sampling(), 4)
    trace = tracer.begin(Texts([prompt], [output], [True]), "fp32")
    tracer.add(trace, "fp32", Runner(target.model, vocab_size=SIZES[0]), draft, taus=(0.7,))
    law: Any
    (law,) = trace.laws["fp32", 0.7]
    q = torch.stack([fresh_q(model, prompt + output[:place], 0.7) for place in range(len(output))])
    torch.testing.assert_close(law.q_text.float(), q[range(6), output], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(law.confidence.float(), q.amax(-1), rtol=1e-3, atol=1e-5)
    assert float(law.q_text[0]) == 0.0  # ab is no token of the draft


def test_words_of_a_tokenizer_that_joins_them_with_spaces_are_shared() -> None:
    shared = shared_tokens(tiny_tokenizer(), tiny_tokenizer(90), 101, 90)
    assert shared.target == (1, *range(3, 90)) and shared.draft == shared.target
