"""The feature head: what drafting computes step by step is what training and the trace compute at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_model, tiny_tokenizer
from torch.nn import functional as F

from lossyspec.decoder import Decoder
from lossyspec.decoding import Batch
from lossyspec.drafting import Proposal, Request
from lossyspec.drafts import LoadedHead, load_draft
from lossyspec.errors import ConfigurationError
from lossyspec.feature_head import FeatureHead, HeadShape
from lossyspec.head_drafting import FeatureDraft
from lossyspec.head_files import load_head, read_card, save_head
from lossyspec.loading import LoadedModel
from lossyspec.rows import Job, Row
from lossyspec.runner import Runner
from lossyspec.sampling import Choice, probabilities
from lossyspec.settings import Sampling, ScheduleRow, Settings
from lossyspec.stopping import Stopping
from lossyspec.verification import judge

PROMPTS = [[5, 6, 7, 8, 9, 10], [3, 4, 5], [20, 21, 22, 23] * 4, [50, 51]]
IDENTITY = {"id": "tiny", "revision": None, "config_sha256": "c" * 64, "weights_sha256": "w" * 64}


def tiny_head(layers: int = 2, vocab: int = 60, width: int = 32) -> FeatureHead:
    torch.manual_seed(1)
    return FeatureHead(HeadShape(32, width, 4, 2, 64, layers, vocab), torch.randperm(VOCAB)[:vocab].sort().values).eval()


def target(architecture: str = "llama") -> LoadedModel:
    return LoadedModel(tiny_model(architecture), tiny_tokenizer(), dict(IDENTITY), "fp32")


def decoders(architecture: str = "llama", head: FeatureHead | None = None) -> tuple[Decoder, Decoder]:
    loaded = target(architecture)
    return Decoder(loaded, LoadedHead(head or tiny_head(), {"id": "head"})), Decoder(loaded)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "qwen3", "gemma3", "opt", "phi", "gpt_neox"])
@pytest.mark.parametrize("theta", [0.0, 0.03])
def test_greedy_lossless_is_token_identical_to_plain(architecture: str, theta: float) -> None:
    drafted, plain = decoders(architecture)
    settings = Settings(draft_length=4, theta=theta)
    got = drafted.generate_ids(PROMPTS, 32, settings=settings, temperature=0.0)
    want = plain.generate_ids(PROMPTS, 32, settings=Settings(draft_length=0), temperature=0.0)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in want]
    assert got.stats.drafted > 0


def test_a_packed_head_is_near_the_dense_one_and_reads_its_own_bytes_alone() -> None:
    target = Runner(tiny_model("llama"), "target", VOCAB)
    ids, laws, drafts = [5, 6, 7, 8, 9, 10, 11, 12], [], []
    target.start([ids], 64)
    for packed in (False, True):
        drafts.append(FeatureDraft(tiny_head(), target.model, VOCAB, packed))
        laws.append(torch.stack(drafts[-1].along(ids[:4], ids[4:], target.features, 2)).softmax(-1))
    assert 0.0 < float((laws[0] - laws[1]).abs().sum(-1).mean()) < 0.05
    assert not any(isinstance(part, torch.nn.Linear) for part in drafts[1].head.modules())
    generator = torch.Generator().manual_seed(0)
    drafts[1].start([ids], 64)
    drafts[1].observe(target.features, [0])
    proposal = drafts[1].propose(Request([ids], [2], Settings(draft_length=2), [Choice(Sampling(), generator)]))
    assert proposal.q is not None and target.features is not None
    first = drafts[1].along(ids, [0], torch.cat([target.features, target.features[:, -1:]], 1), 1)[0].softmax(-1)
    torch.testing.assert_close(proposal.q[0, 0], first[0], atol=2e-4, rtol=2e-2)  # its products are bf16


@pytest.mark.parametrize("width", [32, 64])
def test_a_round_proposes_the_laws_that_unroll_gives_at_each_depth(width: int) -> None:
    decoder, _ = decoders(head=tiny_head(width=width))
    draft: Any = decoder.draft
    ids = [5, 6, 7, 8, 9, 10, 11, 12]
    decoder.target.start([ids], 64)
    draft.start([ids], 64)
    draft.observe(decoder.target.features, [0])
    generator = torch.Generator().manual_seed(0)
    proposal = draft.propose(Request([ids], [4], Settings(draft_length=4), [Choice(Sampling(), generator)]))
    assert proposal.lengths == [4] and proposal.q is not None
    grown = ids + proposal.tokens[0].tolist()
    features = torch.zeros(1, len(grown) - 1, 32)
    assert decoder.target.features is not None
    features[:, : len(ids) - 1] = decoder.target.features
    embedded = F.embedding(torch.tensor([grown[1:]]), draft.embeddings)
    with torch.inference_mode():
        for depth, output in enumerate(draft.head.unroll(embedded, features, 4)):
            q = (draft.rows(output[:, len(ids) - 2 + depth]) + draft.head.bias).softmax(-1)
            torch.testing.assert_close(q[0], proposal.q[0, depth], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        (Settings(draft_length=3), True),
        (Settings(draft_length=0), False),
        (Settings(draft_length=3, source="ngram"), False),
        (Settings(draft_length=3, source="mixed"), True),
        (Settings(draft_length=3, schedule=(ScheduleRow(batch=(1, 2), draft_length=3),)), False),  # not at four rows
    ],
)
def test_prompts_are_read_as_a_batch_starts_where_its_rounds_will_draft(settings: Settings, read: bool) -> None:
    decoder, _ = decoders()
    draft: Any = decoder.draft
    job, batch = Job(settings, Sampling(), Stopping(8), torch.Generator()), Batch(decoder.target, draft)
    batch.start([Row(index, prompt, job) for index, prompt in enumerate(PROMPTS)])
    assert draft._known == [len(prompt) - 1 if read else 0 for prompt in PROMPTS]


def test_the_same_proposal_comes_from_one_row_and_from_a_ragged_batch() -> None:
    head = tiny_head()
    for sampling in ({"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.3}):
        together, _ = decoders(head=head)
        got = together.generate_ids(PROMPTS, 24, settings=Settings(draft_length=3), **sampling)
        for prompt, answer in zip(PROMPTS, got, strict=True):
            alone, _ = decoders(head=head)
            assert alone.generate_ids([prompt], 24, settings=Settings(draft_length=3), **sampling)[0].tokens == answer.tokens


@pytest.mark.parametrize("rule", ["exact", "mixture", "optimal", "priced", "lenience", "typical", "fuzzy"])
def test_a_verdict_on_the_support_is_the_verdict_on_all_tokens(rule: str) -> None:
    torch.manual_seed(3)
    support = torch.tensor([1, 2, 5, 7, 8])
    rows, width, size = 6, 3, 11
    p = torch.softmax(2 * torch.randn(rows, width + 1, size), -1)
    q = torch.softmax(2 * torch.randn(rows, width, len(support)), -1)
    tokens = support[torch.randint(len(support), (rows, width))]
    small = Proposal(tokens, [3, 3, 2, 1, 3, 0], q, 3, support)
    settings = Settings(rule=rule, alpha=0.4)  # type: ignore[arg-type]
    alpha = torch.full((rows, width), 0.4)
    for seed in range(40):
        uniforms = torch.rand(rows, width + 1, generator=torch.Generator().manual_seed(seed))
        got = judge(p, small, settings, alpha, uniforms, greedy=False)
        assert got[:2] == judge(p, small.on_all(size), settings, alpha, uniforms, greedy=False)[:2]


def test_sampling_filters_apply_to_q_over_the_support() -> None:
    decoder, _ = decoders()
    generation = decoder.generate_ids(
        PROMPTS, 24, seed=1, settings=Settings(draft_length=3), temperature=0.8, top_k=5, top_p=0.9
    )
    assert generation.stats.drafted > 0
    logits = torch.randn(4, 60)
    q = probabilities(logits, Sampling(temperature=0.8, top_k=5))
    assert int((q > 0).sum(-1).max()) <= 5


def test_files_round_trip_and_refuse_another_target(tmp_path: Path) -> None:
    head, loaded = tiny_head(), target()
    save_head(tmp_path / "head", head, {"target": dict(IDENTITY)})
    again = load_head(tmp_path / "head", loaded)
    assert torch.equal(again.token_map, head.token_map)
    for name, value in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name].float(), value.float(), atol=1e-3, rtol=1e-3)
    draft = load_draft(str(tmp_path / "head"), loaded, "fp32")
    assert isinstance(draft, LoadedHead) and draft.identity["weights_sha256"]
    other = LoadedModel(loaded.model, loaded.tokenizer, {**IDENTITY, "weights_sha256": "x" * 64}, "fp32")
    with pytest.raises(ConfigurationError, match=r"trained for tiny .*lossytune distill"):
        load_head(tmp_path / "head", other)
    (tmp_path / "head" / "card.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"card\.json"):
        read_card(tmp_path / "head")


def test_rows_leave_a_batch_and_the_rest_goes_on_alike() -> None:
    head = tiny_head()
    decoder, plain = decoders(head=head)
    decoder.eos_ids = plain.eos_ids = frozenset(range(3, 30))  # rows end early, at different rounds
    got = decoder.generate_ids(PROMPTS, 40, settings=Settings(draft_length=3), temperature=0.0)
    want = plain.generate_ids(PROMPTS, 40, settings=Settings(draft_length=0), temperature=0.0)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in want]
