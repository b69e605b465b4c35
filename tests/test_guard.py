"""The guard: what it counts is the law that was emitted; over its limit a request follows the target's own, and no other."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from test_decoding import LawRunner, run
from test_session import make

from lossyspec.acceptance import emitted_law, total_variation
from lossyspec.counters import Counters
from lossyspec.decoding import decode
from lossyspec.drafting import Proposal, Request, StatelessDraft, draw_round
from lossyspec.errors import ConfigurationError
from lossyspec.guard import Guard, Watch
from lossyspec.profile import Evidence
from lossyspec.records import Estimate, Quality
from lossyspec.rows import Job, Row
from lossyspec.settings import Sampling, Settings
from lossyspec.stats import Round, Stats
from lossyspec.stopping import Stopping

P, Q, ALPHA = (0.5, 0.3, 0.2), (0.1, 0.3, 0.6), 0.6
#: of the rule `optimal`, which moves by alpha TV
STEP = ALPHA * 0.4


class LawDraft(StatelessDraft):
    """Draws every token from Q."""

    def propose(self, request: Request) -> Proposal:
        live = [limit > 0 for limit in request.limits]
        law = torch.tensor(Q).expand(len(live), -1)
        return draw_round(request, lambda column, drafted: law, live, torch.device("cpu"))


def guarded(guard: Guard, count: int, new: int, draft_length: int = 1, seed: int = 0) -> tuple[list[Row], Counters]:
    counters = Counters()
    settings = Settings(alpha=ALPHA, draft_length=draft_length)
    job = Job(settings, Sampling(), Stopping(new), torch.Generator().manual_seed(seed))
    *_, rows = decode(LawRunner(P), LawDraft(), [[0]] * count, job, Stats(), watch=Watch(counters, guard))  # type: ignore[arg-type]
    return rows, counters


def fits(counts: list[float], law: list[float]) -> bool:
    return bool(chisquare(counts, [share * sum(counts) for share in law]).pvalue > 1e-3)


def test_the_step_of_these_laws_is_what_the_rule_emits() -> None:
    p, q = torch.tensor(P, dtype=torch.float64), torch.tensor(Q, dtype=torch.float64)
    law = emitted_law("optimal", p, q, torch.tensor(ALPHA, dtype=torch.float64))
    assert float(total_variation(law, p)) == pytest.approx(STEP, abs=1e-12)


@pytest.mark.parametrize("budget", [2.5, 4.5])
def test_a_request_is_exact_from_the_round_after_its_budget_is_spent(budget: float) -> None:
    """Of each row the first ceil(budget) relaxed tokens count, one a round, and none comes later."""
    rows, counters = guarded(Guard(request=budget * STEP / 100, least_tokens=100), count=400, new=24)
    for row in rows:
        assert sum(row.relaxed) == int(budget) + 1
        assert row.variation == pytest.approx(sum(row.relaxed) * STEP, rel=1e-5)
        assert row.guarded == "request"
    seen = counters.snapshot()
    assert seen["guard_trips"] == {"request": 400, "rolling": 0}
    assert seen["relaxed"] == 400 * (int(budget) + 1)
    assert seen["variation"] == pytest.approx(seen["relaxed"] * STEP, rel=1e-5)
    relaxed = [row.output[place] for row in rows for place, mark in enumerate(row.relaxed) if mark]
    exact = [token for row in rows for token, mark in zip(row.output, row.relaxed, strict=True) if not mark]
    p, q = torch.tensor(P, dtype=torch.float64), torch.tensor(Q, dtype=torch.float64)
    law = emitted_law("optimal", p, q, torch.tensor(ALPHA, dtype=torch.float64)).tolist()
    assert fits([relaxed.count(token) for token in range(3)], law)
    assert not fits([relaxed.count(token) for token in range(3)], list(P))
    assert fits([exact.count(token) for token in range(3)], list(P))


def test_the_law_of_a_guarded_text_is_the_sum_over_its_rounds() -> None:
    """By enumeration of texts and of how far the round and the budget are, which both follow from the request alone."""
    p, q = torch.tensor(P, dtype=torch.float64), torch.tensor(Q, dtype=torch.float64)
    laws = {alpha: emitted_law("optimal", p, q, torch.tensor(alpha, dtype=torch.float64)) for alpha in (0.0, ALPHA)}
    kept = {
        alpha: torch.minimum(q, law) for alpha, law in laws.items()
    }  # what clipping keeps of q; the rest follows a rejection
    new, length, most = 4, 2, 1  # lossless once one relaxed round is over

    def chance(text: tuple[int, ...], spent: int, drafted: int, alpha: float) -> float:
        """Of the rest of a text: `drafted` tokens are accepted in this round, which began with `alpha`."""
        if not text:
            return 1.0
        head, *rest = text
        after = 0.0 if spent >= most else ALPHA
        if drafted == length or len(text) == 1:  # the token after the accepted ones; a last token is not drafted
            return P[head] * chance(tuple(rest), spent, 0, after)
        now = spent + (alpha > 0)
        yes = float(kept[alpha][head]) * chance(tuple(rest), now, drafted + 1, alpha)
        no = float(laws[alpha][head] - kept[alpha][head])
        return yes + no * chance(tuple(rest), now, 0, 0.0 if now >= most else ALPHA)

    texts = list(itertools.product(range(3), repeat=new))
    wanted = [chance(text, 0, 0, ALPHA) for text in texts]
    assert sum(wanted) == pytest.approx(1.0, abs=1e-9)
    rows, _ = guarded(Guard(request=0.5 * STEP / 100, least_tokens=100), count=12_000, new=new, draft_length=length)
    said = [tuple(row.output) for row in rows]
    assert fits([said.count(text) for text in texts], [value / sum(wanted) for value in wanted])


def test_without_a_limit_and_at_alpha_0_nothing_trips() -> None:
    rows, counters = guarded(Guard(), count=20, new=30)
    assert counters.snapshot()["guard_trips"] == {"request": 0, "rolling": 0}
    assert all(row.guarded is None and sum(row.relaxed) > 8 for row in rows)
    rows, stats = run(LawRunner(P), LawDraft(), [[0]] * 5, Settings(draft_length=2), Sampling(), new=30)
    assert all(row.variation == 0.0 and not any(row.relaxed) for row in rows)
    assert stats.drafted > 0


def test_the_rolling_limit_closes_and_opens_with_the_window() -> None:
    """Requests that meet a window over its limit are lossless; those that come when it has been diluted are not."""
    watch = Watch(Counters(), Guard(rolling=0.1, window=100))

    def request(tv: float) -> Row:
        job = Job(Settings(alpha=0.5), Sampling(), Stopping(50), torch.Generator())
        row = Row(0, [0], job, output=[1] * 10, variation=tv)
        watch.saw([row], Round([4], [4], [10], [4], [tv], 4, 0.1, 0.2, 0.1, 0.5))
        return row

    assert [request(2.0).guarded for _ in range(6)] == [None] * 5 + ["rolling"]  # over 0.1 * 100 at the sixth
    assert request(0.0).guarded == "rolling"  # ten rounds of ten tokens are in the window: 12 > 10
    values = [request(0.0).guarded for _ in range(6)]
    assert values[-1] is None and values[0] == "rolling"
    assert watch.counters.snapshot()["rolling_variation"] == pytest.approx(0.06, abs=0.021)
    assert watch.counters.snapshot()["guard_trips"]["request"] == 0


def test_a_decoder_guards_and_counts_all_its_runs() -> None:
    decoder = make("model", alpha=1.0)
    free = decoder.generate_ids([[5, 6, 7]], 40, seed=1)[0]
    assert free.variation > 0.5
    decoder.watch.guard = Guard(request=0.01, least_tokens=1)
    held = decoder.generate_ids([[5, 6, 7]], 40, seed=1)[0]
    with decoder.session() as chat:
        again = chat.generate_ids([5, 6, 7], 40, seed=1)[0]
    assert again.tokens == held.tokens
    first = held.relaxed.index(True)
    assert held.tokens[: first + 1] == free.tokens[: first + 1]
    assert held.variation < free.variation and not any(held.relaxed[first + 5 :])
    stream = decoder.stream("w1 w2", 30, seed=3)
    next(stream)
    stream.close()
    seen = decoder.counters.snapshot()
    assert seen["finished"] == {"stop": 0, "length": 3, "cancelled": 1, "error": 0}
    assert seen["requests"] == 4 and seen["guard_trips"]["request"] >= 2
    assert seen["prompt_tokens"] == 11 and seen["profile"] == {"given": 1}
    assert seen["tokens"] >= 121 and 0 < seen["accepted"] <= seen["drafted"]


def test_errors_are_counted() -> None:
    decoder = make("ngram")

    def broken(ids: Any, scores: Any) -> Any:
        raise KeyError("x")

    with pytest.raises(KeyError):
        decoder.generate_ids([[5, 6], [7]], 4, processors=[broken])
    assert decoder.counters.snapshot()["finished"]["error"] == 2
    with pytest.raises(ConfigurationError):
        decoder.generate_ids([[5] * 3000], 4)
    assert decoder.counters.snapshot()["requests"] == 2  # what is refused was never a request


# --- the band of a profile ---


def evidence(tv: float | None, spread: float | None, tokens: int = 6400, texts: int = 100) -> Evidence:
    one = Estimate(value=1.0)
    quality = Quality(
        perplexity_ratio=one, tokens=tokens, texts=texts, corpus="target_samples", tv=tv, kl_forward=None,
        kl_reverse=None, certificate=None, tv_spread=spread,
    )  # fmt: skip
    empty = dict.fromkeys(Evidence.model_fields)
    return Evidence(**{**empty, "batch_size": 1, "speedup": one, "plain_tokens_per_s": 1.0, "quality": quality})


def test_the_band_is_four_standard_deviations_of_the_mean() -> None:
    guard = Guard.of(evidence(0.05, 0.16), window=1600)
    assert guard is not None
    assert (guard.least_tokens, guard.window) == (64, 1600)
    assert guard.request == pytest.approx(0.05 + 4 * 0.16 * (1 / 64 + 1 / 6400) ** 0.5)
    assert guard.rolling == pytest.approx(0.05 + 4 * 0.16 * (1 / 1600 + 1 / 6400) ** 0.5)
    assert Guard.of(evidence(0.9, 5.0)).request == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(("tv", "spread"), [(None, None), (0.1, None)])
def test_a_profile_without_a_band_guards_nothing(tv: float | None, spread: float | None) -> None:
    assert Guard.of(evidence(tv, spread)) is None


# --- the counters ---

LINE = re.compile(r'^(?P<name>[a-z_]+)(\{(?P<label>[a-z]+)="(?P<value>(\\[\\"n]|[^"\\\n])*)"\})? (?P<number>[-+0-9.e]+)$')


def parsed(text: str) -> dict[tuple[str, str | None], float]:
    """Reads the exposition format; each sample after the HELP and TYPE lines of its own name."""
    assert text.endswith("\n") and "\n\n" not in text
    found: dict[tuple[str, str | None], float] = {}
    name = kind = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in {known for known, _ in found}
        elif line.startswith("# TYPE "):
            _, _, same, kind = line.split(" ")
            assert same == name and kind in ("counter", "gauge")
        else:
            match = LINE.match(line)
            assert match is not None and match["name"] == name, line
            assert (kind == "counter") == name.endswith("_total")
            found[name, match["value"]] = float(match["number"])
    return found


def test_prometheus_text_has_every_number_of_the_snapshot() -> None:
    decoder = make("model", alpha=0.6)
    decoder.generate_ids([[5, 6, 7], [8, 9]], 12, seed=1)
    seen, lines = decoder.counters.snapshot(), parsed(decoder.counters.prometheus())
    assert lines["lossyspec_tokens_total", None] == seen["tokens"] == 24
    assert lines["lossyspec_requests_finished_total", "length"] == 2
    assert lines["lossyspec_relaxed_variation_total", None] == seen["variation"] > 0
    assert lines["lossyspec_phase_seconds_total", "verify"] == seen["seconds"]["verify"] > 0
    assert lines["lossyspec_profile_info", "given"] == 1
    values = [part for value in seen.values() for part in (value.values() if isinstance(value, dict) else [value])]
    assert sorted(lines.values()) == sorted(map(float, values))


def test_labels_are_escaped() -> None:
    text = Counters('a"b\\c\nd').prometheus()
    assert 'lossyspec_profile_info{match="a\\"b\\\\c\\nd"} 1\n' in text
    assert ("lossyspec_profile_info", 'a\\"b\\\\c\\nd') in parsed(text)


def test_no_count_is_lost_between_threads() -> None:
    counters = Counters()
    done = Round([2, 3], [1, 3], [2, 4], [1, 2], [0.25, 0.5], 3, 0.5, 1.0, 0.25, 2.0)

    def work() -> None:
        for _ in range(500):
            counters.add(done)
            counters.finished("stop")
            counters.tripped("rolling")
            counters.began([3, 4], 0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = counters.snapshot()
    assert (seen["passes"], seen["rounds"], seen["tokens"], seen["drafted"], seen["accepted"]) == (
        2000, 4000, 12000, 10000, 8000,
    )  # fmt: skip
    assert (seen["relaxed"], seen["variation"], seen["requests"], seen["prompt_tokens"]) == (6000, 1500.0, 4000, 14000)
    assert seen["seconds"] == {"prefill": 1000.0, "draft": 1000.0, "verify": 2000.0, "host": 1000.0}
    assert seen["finished"]["stop"] == seen["guard_trips"]["rolling"] == 2000
    seen["finished"]["stop"] = -1  # a snapshot is a copy
    assert counters.snapshot()["finished"]["stop"] == 2000
