"""The head that ships for the embedded target: it is the default draft, it is near the target, and it loses nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lossyspec.decoder import Decoder
from lossyspec.drafts import LoadedHead, automatic, load_draft
from lossyspec.head_files import embedded_head, read_card
from lossyspec.loading import LoadedModel, load
from lossyspec.prompts import prompt_ids
from lossyspec.settings import Settings
from lossyspec.tuner.workloads import load_workload

pytestmark = pytest.mark.real_model

TOKENS = 48


@pytest.fixture(scope="module")
def folder() -> Path:
    folder = embedded_head()
    assert folder is not None
    return folder


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load("embedded")


@pytest.fixture(scope="module")
def decoder(target: LoadedModel) -> Decoder:
    draft = load_draft("auto", target, "fp32")
    assert automatic("embedded") == "head" and isinstance(draft, LoadedHead)
    return Decoder(target, draft)


@pytest.fixture(scope="module")
def prompts(target: LoadedModel) -> list[list[int]]:
    return [prompt_ids(target.tokenizer, item.messages) for item in load_workload("dialogue").confirm[:4]]


def test_it_is_small_and_its_card_says_where_it_comes_from(folder: Path, target: LoadedModel) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) < 24e6
    card = read_card(folder)
    assert card["target"] == target.identity
    assert card["tokens"] > 0 and card["config"]["target"] == "embedded"
    rows = {(row["temperature"], row["depth"]): row["overlap"] for row in card["overlap"]}
    assert 0.3 < rows[1.0, 1] < 0.9


def test_greedy_decoding_with_it_gives_the_targets_own_tokens(decoder: Decoder, prompts: list[list[int]]) -> None:
    plain = decoder.generate_ids(prompts, TOKENS, settings=Settings(draft_length=0), temperature=0.0)
    drafted = decoder.generate_ids(prompts, TOKENS, settings=Settings(draft_length=3), temperature=0.0)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert drafted.stats.acceptance is not None and drafted.stats.acceptance > 0.25


def test_what_is_accepted_is_what_its_overlap_promises(decoder: Decoder, prompts: list[list[int]], folder: Path) -> None:
    """At depth 1 a token is accepted with probability sum(min(p, q)); the card has it from texts of another kind."""
    rows = {(row["temperature"], row["depth"]): row["overlap"] for row in read_card(folder)["overlap"]}
    settings, drafted, accepted = Settings(rule="exact", draft_length=1), 0, 0
    for seed in range(3):
        stats = decoder.generate_ids(prompts, TOKENS, settings=settings, temperature=1.0, seed=seed).stats
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    spread = 4 * math.sqrt(0.25 / drafted)
    assert abs(accepted / drafted - rows[1.0, 1]) < spread + 0.08


def test_beside_an_int4_target_it_is_int8_and_drafts_as_well(decoder: Decoder, prompts: list[list[int]]) -> None:
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"):
        pytest.skip("no kernel for packed weights on this CPU")
    target = load("embedded", "int4")
    packed = Decoder(target, load_draft("auto", target, "int4"))
    settings = Settings(rule="exact", draft_length=2)
    rates = [
        each.generate_ids(prompts, TOKENS, settings=settings, temperature=0.7, seed=0).stats.acceptance
        for each in (decoder, packed)
    ]
    assert None not in rates and rates[1] > rates[0] - 0.12
