"""The stages of a search, each from stored inputs to stored outputs: trace, costs, trials, live runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from lossyspec.cost_table import CostTable
from lossyspec.drafting import CompactDraft, Draft
from lossyspec.hardware import HardwareInfo, used_gpu
from lossyspec.nvml import nvml_session
from lossyspec.records import BlockRecord, TrialRecord
from lossyspec.runner import Runner
from lossyspec.self_drafting import SelfDraft
from lossyspec.settings import Attention, Compile, Precision, format_of

from .measurement.costs import CostMeter
from .measurement.energy import find_energy_meter
from .measurement.live import Contestant, measure_blocks
from .objective import Objective
from .store import RunFolder
from .study import Limits, Study
from .texts import sampled_texts
from .trace import Trace, Tracer
from .trace_files import load_trace, save_trace
from .work import Work

#: what the target and the draft run in
Format = tuple[Precision, Attention]

_MIN_BLOCKS, _MAX_BLOCKS = 6, 64
#: share of the budget that is kept for the live runs
_LIVE_SHARE = 0.5
#: trials that are made even when the budget is spent: a replay takes milliseconds
_LEAST_TRIALS = 300
#: share of the budget that the cost table may take
_COST_SHARE = 0.15
#: seconds of the budget that are kept for what follows the live runs
_END_S = 10.0


def make_traces(work: Work, folder: RunFolder) -> dict[str, Trace]:
    """The texts of both halves (and the references), and the trace of the search half at each precision; from the run
    folder when it has them. The others are traced when it is known which points are confirmed."""
    if folder.trace.exists():
        work.reporter.say("trace: from the run folder")
        return load_trace(folder.trace)
    tracer = _tracer(work)
    traces = {half: tracer.begin(part, work.reference) for half, part in sampled_texts(work).items()}
    formats = itertools.product(work.space.precisions, map(Attention.named, work.space.attentions))
    _add(work, {"search": traces["search"]}, dict.fromkeys(formats, work.space.taus))
    save_trace(folder.trace, traces)
    return traces


def trace_chosen(work: Work, traces: dict[str, Trace], chosen: Sequence[TrialRecord], folder: RunFolder) -> None:
    """Adds to the confirmation half and the references what the chosen points need."""
    needed: dict[Format, set[float]] = {(work.reference, Attention()): {1.0} & set(work.space.taus)}
    for record in chosen:
        taus = {record.settings.tau} if work.pool.dense and record.settings.draft_length else set()
        needed.setdefault((record.settings.precision.target, record.settings.attention), set()).update(taus)
    rest = {half: trace for half, trace in traces.items() if half != "search"}
    _add(work, rest, {form: sorted(taus) for form, taus in needed.items()})
    save_trace(folder.trace, traces)


def _tracer(work: Work) -> Tracer:
    return Tracer(work.sampling, work.config.max_draft_length, boundaries=work.pool.decoder(work.reference).boundaries)


def _add(work: Work, traces: dict[str, Trace], wanted: Mapping[Format, Sequence[float]]) -> None:
    """Runs the models along the texts of each trace, in each format that it does not hold yet."""
    tracer = _tracer(work)
    total = sum(trace.texts.tokens for trace in traces.values())
    count = sum(len(trace.texts.prompts) for trace in traces.values()) * len(wanted)
    with work.reporter.steps(f"tracing {total} tokens in {', '.join(itertools.starmap(format_of, wanted))}", count) as step:
        for trace in traces.values():
            for (precision, attention), taus in wanted.items():
                decoder = work.pool.decoder(precision)
                draft = _traced_draft(decoder.draft, attention)
                drawn = taus if draft is not None else ()
                form, drafting = format_of(precision, attention.on("verify")), format_of(precision, attention)
                if form in trace.plain and all((drafting, tau) in trace.laws for tau in drawn):
                    continue
                tracer.add(trace, precision, decoder.target, draft, step.advance, drawn, attention)


def _traced_draft(draft: Draft, attention: Attention) -> Runner | CompactDraft | None:
    """What a trace asks for the laws of a draft; None: it draws none, as the draft `self` with dense attention."""
    if isinstance(draft, SelfDraft):
        return draft.seeing(attention) if attention.side == "draft" else None
    return draft if isinstance(draft, CompactDraft) else getattr(draft, "runner", None)


def make_meter(work: Work, trace: Trace) -> CostMeter:
    """A cost meter at the workload's middle context length, which gives each cell its part of the budget."""
    prompts = trace.texts.prompts
    lengths = sorted(len(prompt) + len(output) // 2 for prompt, output in zip(prompts, trace.texts.outputs, strict=True))
    return CostMeter(
        work.pool.runners,
        prompts,
        lengths[len(lengths) // 2],
        work.sampling,
        work.config.max_draft_length,
        cell_s=_COST_SHARE * work.config.budget_s / (2 * len(_cells(work))),
        precision=work.reference,
        cuda_graphs=work.config.cuda_graphs,
    )


def _cells(work: Work) -> list[tuple[int, Precision, Attention, Compile]]:
    attentions = [Attention.named(name) for name in work.space.attentions]
    return list(itertools.product(work.space.batch_sizes, work.space.precisions, attentions, work.space.compiles))


def measure_costs(work: Work, meter: CostMeter, folder: RunFolder) -> None:
    """Fills the cost table for each precision and batch size, and writes it."""
    if folder.costs.exists():  # on resume they hold for the search; the live runs measure speed anew in any case
        meter.table = CostTable.read(folder.costs)
    known, cells = len(meter.table.round_s), _cells(work)
    with work.reporter.steps(
        f"measuring the cost of a round ({', '.join(work.space.precisions)}; batch "
        f"{', '.join(map(str, work.space.batch_sizes))})",
        len(cells),
    ) as step:
        for batch, precision, attention, how in cells:
            meter.round_s(precision, batch, attention.on("verify"), how)
            meter.draft_s(precision, batch, attention.on("draft"))
            meter.lookup_s(batch)
            step.advance()
            if work.stop():
                break
        if len(meter.table.round_s) > known and not work.stop():
            for batch in work.space.batch_sizes:
                meter.even_out(work.space.precisions, batch)
    meter.table.write(folder.costs)


def search_trials(work: Work, objective: Objective, folder: RunFolder) -> Study:
    """Searches by replay until the trials or the share of the budget are spent."""
    here, context = work.pool.here(), max(map(len, objective.replay.trace.texts.prompts)) + work.config.max_new_tokens
    limit = _memory_limit_bytes(work.hardware)
    limits = Limits(
        work.config.max_quality_loss, limit, lambda settings, batch: work.pool.memory_bytes(settings, batch, context)
    )
    digest = work.space.digest(
        here.target.weights_sha256 or "",
        here.draft.weights_sha256 or "ngram",
        work.workload.sha256,
        here.device.name,
        str(work.config.max_quality_loss),
        str(work.sampling),
    )
    study = Study(
        work.space,
        objective,
        limits,
        folder.add_trial,
        seed=work.config.seed,
        name=f"{work.config.task}-{digest[:12]}",
        storage=work.config.storage,
        done=folder.trials(),
    )
    if len(study.records) < work.config.trials:
        study.enqueue_baselines()  # on resume those that were not reached
    share = work.began + (1 - _LIVE_SHARE) * work.config.budget_s
    least = min(work.config.trials, _LEAST_TRIALS)
    with work.reporter.steps(f"searching {work.config.trials} configurations by replay", work.config.trials) as step:
        study.run(work.config.trials, lambda: work.stop() or (monotonic() > share and len(study.records) >= least), step.at)
    states = [record.state for record in study.records]
    work.reporter.say(
        f"{len(states)} trials: {states.count('complete')} complete, {states.count('infeasible')} over the loss limit, "
        f"{states.count('failed')} failed"
    )
    return study


def measure_live(
    work: Work, chosen: Sequence[TrialRecord], traces: dict[str, Trace], folder: RunFolder
) -> list[BlockRecord]:
    """Runs the chosen points, plain first, against each other and transformers."""
    plain = chosen[0]
    limit = work.config.max_new_tokens
    contestants = [
        Contestant(
            str(record.number),
            record.batch_size,
            named(str(record.number), work.pool.run_settings(record.settings, work.sampling, limit)),
        )
        for record in chosen
    ]
    outside = work.pool.run_transformers(plain.settings.precision.target, work.sampling, limit)
    contestants.append(Contestant("transformers", plain.batch_size, named("transformers", outside), every=2))
    left = max(work.config.budget_s - (monotonic() - work.began) - _END_S, 0.0)
    with work.reporter.steps(
        f"measuring {len(chosen)} points live against plain decoding and transformers, interleaved",
        _MAX_BLOCKS * len(contestants),
    ) as step:

        def keep(record: BlockRecord) -> None:
            folder.add_block(record)
            step.advance()

        with nvml_session(None, []) as nvml:
            work.pool.energy = find_energy_meter(work.hardware, nvml)
            return measure_blocks(
                contestants,
                traces["confirm"].texts.prompts,
                budget_s=left,
                min_blocks=_MIN_BLOCKS,
                max_blocks=_MAX_BLOCKS,
                seed=work.config.seed,
                on_run=keep,
                stop=work.stop,
                done=folder.blocks(),
            )


def named(name: str, run: Callable[[list[list[int]], int], BlockRecord]) -> Callable[[list[list[int]], int], BlockRecord]:
    """A run whose records carry the contestant's name."""
    return lambda prompts, seed: run(prompts, seed).model_copy(update={"contestant": name})


def _memory_limit_bytes(info: HardwareInfo) -> int | None:
    gpu = used_gpu(info)
    if gpu is not None:
        return gpu.memory_bytes
    known = [value for value in (info.cpu.memory_bytes, info.cpu.memory_limit_bytes) if value]
    return min(known) if known else None
