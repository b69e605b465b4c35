"""Distillation on tiny targets: data, training, resuming, files."""

from __future__ import annotations

import contextlib
import io
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny, tiny_model, tiny_tokenizer
from rich.console import Console
from torch.nn import functional as F

from lossyspec.decoder import Decoder
from lossyspec.errors import ConfigurationError, LossyspecError
from lossyspec.feature_head import FeatureHead, HeadShape
from lossyspec.head_files import load_head
from lossyspec.loading import load
from lossyspec.runner import Runner
from lossyspec.tuner.distill.config import DistillConfig
from lossyspec.tuner.distill.data import (
    ChatFrame,
    Shard,
    _Turns,
    chat_frame,
    load_archive,
    load_archives,
    save_archive,
    write_streams,
)
from lossyspec.tuner.distill.loss import laws_loss, overlap
from lossyspec.tuner.distill.muon import Muon, orthogonalised
from lossyspec.tuner.distill.openings import openings_of, read_openings
from lossyspec.tuner.distill.payoff import best_length
from lossyspec.tuner.distill.run import Distillation, make_distill_config
from lossyspec.tuner.distill.training import (
    Recipe,
    Trainer,
    batches,
    frequent_tokens,
    grown,
    learning_rate,
    over_tokens,
    rolled_out,
)
from lossyspec.tuner.progress import Reporter

QUIET = Reporter(Console(file=io.StringIO()))


def shard_of(model: Any, rows: int = 16, length: int = 24, seed: int = 0) -> Shard:
    return write_streams(Runner(model), ChatFrame([3], [], [], frozenset()), rows, length, (0.8, 1.0), seed)


def fresh(model: Any, recipe: Recipe, vocab: int = 101) -> Trainer:
    torch.manual_seed(0)
    head = FeatureHead(HeadShape(32, 32, 4, 4, 96, 1, vocab), torch.arange(vocab))
    weights = model.get_output_embeddings().weight.detach()
    return Trainer(head, model.get_input_embeddings().weight.detach(), weights[head.token_map], recipe, bf16=False)


def test_streams_are_what_the_target_says_with_its_own_features() -> None:
    model = tiny_model("llama")
    shard = shard_of(model)
    assert shard.tokens.shape == (16, 24) and shard.features.shape == (16, 24, 32)
    with torch.inference_mode():
        hidden = model.base_model(input_ids=shard.tokens.long()).last_hidden_state
    torch.testing.assert_close(shard.features.float(), hidden.float(), atol=0.03, rtol=0.03)  # stored as bf16
    assert torch.equal(shard_of(model).tokens, shard.tokens)
    assert not torch.equal(shard_of(model, seed=1).tokens, shard.tokens)


def test_the_frame_of_a_template_and_its_forced_tokens() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "w9 {% for m in messages %}w1 {{ m['content'] }} </s> w2 {% endfor %}"
    frame = chat_frame(tokenizer, frozenset({1}))
    w = lambda index: index + 3  # noqa: E731
    assert frame.opening == [w(9), w(1)] and frame.to_answer == [1, w(2), w(1)] and frame.ends == {1}
    turns = _Turns(frame, 2)
    taken = [turns.next([20, 1]), turns.next([21, 50]), turns.next([1, 50]), turns.next([60, 22])]
    assert [part[0] for part in taken] == [[20, 1], [21, w(2)], [1, w(1)], [w(2), 22]]
    assert [part[1] for part in taken] == [[False, False], [False, True], [False, True], [True, False]]


def test_every_other_message_of_a_user_begins_as_it_is_told_to() -> None:
    frame = ChatFrame([3], [4, 5], [6, 7], frozenset({1}))
    turns = _Turns(frame, 200, [[30, 31], [40]], seed=1)
    first = [tuple(queue) for queue in turns.pending]
    assert set(first) == {(), (30, 31), (40,)} and 70 < first.count(()) < 130
    assert first == [tuple(queue) for queue in _Turns(frame, 200, [[30, 31], [40]], seed=1).pending]
    row = first.index((30, 31))
    taken = [turns.next([50] * 200) for _ in range(3)]
    assert [part[0][row] for part in taken] == [30, 31, 50] and [part[1][row] for part in taken] == [True, True, False]
    turns.next([1] * 200)  # the message ends: the way to the answer is the template's alone
    assert {tuple(queue) for queue in turns.pending} == {(5,)}
    turns.next([50] * 200)
    turns.next([1] * 200)
    assert {tuple(queue) for queue in turns.pending} == {(7,), (7, 30, 31), (7, 40)}


def test_openings_are_lines_with_marked_breaks() -> None:
    assert read_openings("Write a \n\nComplete:\\n\\ndef \n") == ["Write a", "Complete:\n\ndef"]
    assert len(read_openings(files("lossyspec.tuner").joinpath("data", "openings.txt").read_text())) > 100


def test_openings_come_from_a_file_or_with_the_tuner(tmp_path: Path) -> None:
    tokenizer, file = tiny_tokenizer(), tmp_path / "mine.txt"
    assert openings_of(tokenizer, None) == []  # it has no turns
    file.write_text("w1 w2\nw3\n")
    assert openings_of(tokenizer, file) == [tokenizer("w1 w2")["input_ids"], tokenizer("w3")["input_ids"]]
    tokenizer.chat_template = "{{ messages }}"
    assert len(openings_of(tokenizer, None)) > 100
    file.write_text("\n")
    with pytest.raises(ConfigurationError, match=r"mine\.txt is empty; allowed: a text in UTF-8"):
        openings_of(tokenizer, file)
    with pytest.raises(ConfigurationError, match=r"none\.txt.*No such file"):
        openings_of(tokenizer, tmp_path / "none.txt")


def test_training_raises_the_overlap() -> None:
    model = tiny_model("llama")
    trainer = fresh(model, Recipe(steps=60, batch_tokens=384, warm_up=5, depths=2))
    test, weights = shard_of(model, seed=99), model.get_output_embeddings().weight.detach()

    def measured() -> list[float]:
        return [row["overlap"] for row in overlap(trainer.head, trainer.embeddings, weights, test, [1.0], 2)]

    before = measured()
    shards = [shard_of(model, rows=64, seed=seed) for seed in range(3)]

    def stream() -> Any:
        while True:
            for shard in shards:
                for first in range(0, 64, 16):
                    yield shard.rows(slice(first, first + 16))

    trainer.train(stream(), 60, lambda step, loss: True)
    after = measured()
    assert after[0] > before[0] + 0.1 and after[1] > before[1] + 0.03


def test_a_resumed_run_gives_the_weights_of_an_unbroken_one(tmp_path: Path) -> None:
    model, recipe = tiny_model("llama"), Recipe(steps=8, batch_tokens=96, warm_up=2, depths=2)
    for seed in range(2):
        shard_of(model, seed=seed).save(tmp_path / "shards" / f"{seed}.safetensors")
    paths = sorted((tmp_path / "shards").glob("*"))
    unbroken = fresh(model, recipe)
    unbroken.train(batches(paths, recipe, 0), 8, lambda step, loss: True)
    first = fresh(model, recipe)
    first.train(batches(paths, recipe, 0), 8, lambda step, loss: step < 3)
    first.save(tmp_path / "checkpoint")
    second = fresh(model, recipe)
    assert second.load(tmp_path / "checkpoint") and second.step == 3
    second.train(batches(paths, recipe, second.step), 8, lambda step, loss: True)
    for name, value in unbroken.head.state_dict().items():
        assert torch.equal(value, second.head.state_dict()[name]), name
    assert not fresh(model, recipe).load(tmp_path / "nowhere")


def test_each_part_of_a_run_rolls_out_one_step_more() -> None:
    recipe = Recipe(steps=90, warm_up=0, depths=3)
    assert [rolled_out(recipe, step) for step in (0, 29, 30, 59, 60, 90)] == [1, 1, 2, 2, 3, 3]
    assert rolled_out(recipe, 0, spent=0.7) == 3  # where the time runs out first
    assert rolled_out(Recipe(steps=1, depths=1), 1) == 1


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_muons_updates_are_near_orthogonal_and_of_adams_size(shape: tuple[int, int], bf16: bool) -> None:
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.zeros(shape))
    matrix.grad = torch.randn(shape)
    found = orthogonalised(matrix.grad, bf16)
    values = torch.linalg.svdvals(found)
    assert bool((values > 0.5).all() and (values < 1.5).all())
    u, s, vt = torch.linalg.svd(matrix.grad, full_matrices=False)
    assert float((found * (u @ vt)).sum() / s.numel()) > 0.8  # in the gradient's own directions
    Muon([matrix], rate=0.1, weight_decay=0.0, bf16=bf16).step()
    assert float(matrix.detach().square().mean().sqrt()) == pytest.approx(0.02, rel=0.25)
    assert float((matrix.detach() * matrix.grad).sum()) < 0.0


def test_learning_rate_and_token_map(tmp_path: Path) -> None:
    recipe = Recipe(steps=100, warm_up=10, rate=1.0)
    rates = [learning_rate(recipe, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0) and rates[-1] == pytest.approx(0.05)
    shard = shard_of(tiny_model("llama"))
    shard.save(tmp_path / "a.safetensors")
    ids, coverage = frequent_tokens([tmp_path / "a.safetensors"], 20, 101)
    counts = torch.bincount(shard.tokens[~shard.forced].long(), minlength=101)
    assert ids.tolist() == sorted(ids.tolist()) and len(ids) == 20
    assert coverage == pytest.approx(float(counts.sort(descending=True).values[:20].sum() / counts.sum()))


def test_a_head_goes_on_over_other_tokens() -> None:
    torch.manual_seed(0)
    head = FeatureHead(HeadShape(32, 32, 4, 4, 96, 1, 3), torch.tensor([4, 7, 9]))
    with torch.no_grad():
        head.bias.copy_(torch.tensor([0.4, 0.7, 0.9]))
    other = over_tokens(head, torch.tensor([2, 4, 9, 11]))
    assert other.token_map.tolist() == [2, 4, 9, 11] and other.shape.vocab == 4
    torch.testing.assert_close(other.bias.detach(), torch.tensor([0.0, 0.4, 0.9, 0.0]))
    embeddings, features = torch.randn(2, 1, 5, 32)
    for mine, theirs in zip(head.unroll(embeddings, features, 2), other.unroll(embeddings, features, 2), strict=True):
        assert torch.equal(mine, theirs)


def test_a_head_grows_by_layers_that_begin_as_if_not_there() -> None:
    torch.manual_seed(0)
    head = FeatureHead(HeadShape(32, 32, 4, 4, 96, 1, 3), torch.tensor([4, 7, 9]))
    other = grown(head, 3)
    assert other.shape.layers == 3 and grown(head, 1) is head
    embeddings, features = torch.randn(2, 1, 5, 32)
    for mine, theirs in zip(head.unroll(embeddings, features, 2), other.unroll(embeddings, features, 2), strict=True):
        assert torch.equal(mine, theirs)
    other.unroll(embeddings, features, 1)[0].square().sum().backward()
    for block in other.blocks[1:]:
        assert block.out.weight.grad.abs().sum() > 0 and block.down.weight.grad.abs().sum() > 0
    with pytest.raises(ConfigurationError, match="layers is 1; the head to go on from has 3: give at least as many"):
        grown(other, 1)


def test_the_whole_job_resumes_and_its_head_drafts(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    options = {
        "target": str(folder),
        "tokens": 2000,
        "rows": 16,
        "length": 32,
        "vocab": 64,
        "epochs": 2.0,
        "batch_tokens": 256,
    }
    config = make_distill_config(**options)
    with pytest.raises(KeyboardInterrupt):
        Distillation(config, tmp_path / "out", QUIET, stop=iter([False] * 2 + [True] * 9).__next__).run()
    kept = len(list((tmp_path / "out" / "shards").glob("*.safetensors")))
    assert kept == 2
    result = Distillation(config, tmp_path / "out", QUIET).run()
    assert result.card["target"]["id"] == str(folder) and result.card["steps"] > 0 and result.card["tokens"] > 0
    assert {row["depth"] for row in result.card["overlap"]} == {1, 2, 3, 4}
    assert json.loads((result.folder / "card.json").read_text())["overlap"] == result.card["overlap"]
    from lossyspec.drafts import load_draft
    from lossyspec.loading import load

    target = load(str(folder))
    decoder = Decoder(target, load_draft(str(result.folder), target, "fp32"))
    generation = decoder.generate_ids([[5, 6, 7, 8]], 24, temperature=0.0)
    plain = Decoder(target).generate_ids([[5, 6, 7, 8]], 24, temperature=0.0)
    assert generation[0].tokens == plain[0].tokens and generation.stats.drafted > 0
    with pytest.raises(ConfigurationError, match="layers: None then, 2 now"):
        Distillation(make_distill_config(**options, layers=2), tmp_path / "out", QUIET)


def test_streams_of_an_earlier_run_are_read_again_instead_of_written(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    options = {"target": str(folder), "rows": 8, "length": 24, "vocab": 64, "epochs": 1.0, "batch_tokens": 256}
    Distillation(make_distill_config(**options, tokens=1000), tmp_path / "first", QUIET).run()
    archive = tmp_path / "first" / "streams.safetensors"
    again = make_distill_config(**options, tokens=1000, streams=[archive])
    Distillation(again, tmp_path / "second", QUIET).run()
    shards = [sorted((tmp_path / name / "shards").glob("*")) for name in ("first", "second")]
    assert len(shards[0]) == len(shards[1]) == 6
    for one, other in zip(*shards, strict=True):
        written, read = Shard.load(one), Shard.load(other)
        assert torch.equal(written.tokens, read.tokens) and torch.equal(written.forced, read.forced)
        torch.testing.assert_close(written.features.float(), read.features.float(), atol=0.03, rtol=0.03)  # bf16
    more = make_distill_config(**options, tokens=1400, streams=[archive])  # what is wanted beyond them is written
    Distillation(more, tmp_path / "third", QUIET).run()
    assert len(list((tmp_path / "third" / "shards").glob("*"))) == 8
    (tmp_path / "none.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match=r"--streams .*none.safetensors: not an archive"):
        load_archive(tmp_path / "none.safetensors", 101)
    with pytest.raises(ConfigurationError, match="the target has 3 tokens"):
        load_archive(archive, 3)
    both, one = load_archives([archive, archive], 101), load_archive(archive, 101)
    assert torch.equal(both.tokens, one.tokens.repeat(2, 1)) and torch.equal(both.forced, one.forced.repeat(2, 1))
    other = tmp_path / "other.safetensors"
    tokens, forced = one.tokens[:, :20].contiguous(), one.forced[:, :20].contiguous()
    Shard(tokens, forced, torch.zeros(*tokens.shape, 0)).save(tmp_path / "short")
    save_archive([tmp_path / "short"], other)
    with pytest.raises(ConfigurationError, match=r"unlike length .*24 tokens.*20 tokens"):
        load_archives([archive, other], 101)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"tokens": 5}, "tokens is 5"), ({"width": 33}, "width is 33: .*multiple of 32"), ({"seed": -1}, "seed is -1"),
     ({"seed": 2**70}, f"seed is {2**70}")],
)  # fmt: skip
def test_wrong_options_are_named(values: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_distill_config(**values)


def small(folder: Path, **values: Any) -> DistillConfig:
    sizes = {"tokens": 1000, "rows": 8, "length": 24, "vocab": 64, "epochs": 1.0, "batch_tokens": 256}
    return make_distill_config(**{"target": str(folder), **sizes, **values})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"target": "/no/such/model"}, "no such folder"),
        ({"length": 2048}, "length is 2048; the target has 2048 positions"),
        ({"data": Path("none.jsonl")}, "prompts none.jsonl: no such file"),
        ({"streams": [Path("none.safetensors")]}, "--streams none.safetensors: not an archive"),
        ({"start": Path("none")}, "none: not a draft head"),
    ],
)
def test_what_is_refused_leaves_a_folder_that_the_right_options_can_use(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    model = save_tiny(tmp_path / "model")
    with pytest.raises(ConfigurationError, match=said):
        Distillation(small(model, **values), tmp_path / "out", QUIET)
    assert not (tmp_path / "out").exists()
    Distillation(small(model), tmp_path / "out", QUIET)


def test_any_file_of_a_distillation_may_be_damaged_without_a_traceback(tmp_path: Path) -> None:
    config, out = small(save_tiny(tmp_path / "model"), rows=16, length=32, epochs=0.5), tmp_path / "out"
    Distillation(config, out, QUIET).run()
    for path in sorted(entry for entry in out.rglob("*") if entry.is_file()):
        data = path.read_bytes()
        for left in (b"", data[: len(data) // 2], b"[]"):
            path.write_bytes(left)
            # what is written anew in any case may be damaged; the rest is refused by name
            with contextlib.suppress(LossyspecError):
                Distillation(config, out, QUIET).run()
            with contextlib.suppress(LossyspecError):
                load_head(out / "head", load(config.target))
        path.write_bytes(data)


def test_the_users_own_traffic_is_read(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    words = " ".join(f"w{index % 90}" for index in range(40))
    rows = [{"messages": [{"role": "user", "content": words}], "reference": words} for _ in range(6)]
    (tmp_path / "traffic.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = make_distill_config(target=str(folder), data=tmp_path / "traffic.jsonl", epochs=1.0, batch_tokens=64, vocab=64)
    result = Distillation(config, tmp_path / "out", QUIET).run()
    assert result.card["tokens"] > 0


@pytest.mark.parametrize("reach", [0.0, 3.0])
def test_the_loss_and_its_gradients_are_those_of_the_plain_formula(monkeypatch: pytest.MonkeyPatch, reach: float) -> None:
    monkeypatch.setattr("lossyspec.tuner.distill.loss._PIECE", 20 if reach else 7)  # the share is that of a piece
    torch.manual_seed(0)
    outputs = [torch.randn(20, 8, requires_grad=True) for _ in range(2)]
    bias, known, rows = torch.randn(30, requires_grad=True), torch.randn(20, 8), torch.randn(30, 8)
    weights = torch.rand(2, 20)
    weights[1, :4] = 0.0
    target, wanted, overlaps = F.linear(known, rows).log_softmax(-1), torch.zeros(()), []
    for weight, output in zip(weights, outputs, strict=True):
        draft = (F.linear(output, rows) + bias).log_softmax(-1)
        shared = torch.minimum(target, draft).exp().sum(-1)
        overlaps.append(float((weight @ shared / weight.sum()).detach()))
        share = math.exp(-reach * overlaps[-1])
        divergence = (target.exp() * (target - draft)).sum(-1)
        wanted = wanted + 3 * (weight @ (share * divergence + (1 - share) * (1 - shared)))
    gradients = torch.autograd.grad(wanted, (*outputs, bias))
    got, seen = laws_loss(outputs, bias, known, rows, weights, reach)
    torch.testing.assert_close(3 * got, wanted)
    assert seen.tolist() == pytest.approx(overlaps, abs=1e-5)
    for mine, other in zip(torch.autograd.grad(3 * got, (*outputs, bias)), gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)


def test_the_best_draft_length_is_found_by_hand() -> None:
    # 1 + .5 over 1.1 + .1; 1 + .5 + .25 over 1.2 + .2; beyond the last rate it holds
    assert best_length([0.5], [1.0, 1.1], [0.0, 0.1]) == (1, pytest.approx(1.5 / 1.2))
    assert best_length([0.8, 0.5], [1.0, 1.0, 1.0, 1.0], [0.0, 0.1, 0.2, 0.3]) == (
        3,
        pytest.approx((1 + 0.8 + 0.4 + 0.2) / 1.3),
    )
    assert best_length([0.1], [1.0, 1.5], [0.0, 0.5]) == (0, 1.0)
