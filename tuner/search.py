"""The main job from end to end: workload, trace, costs, search, live confirmation, profile. Each step is stored."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from lossyspec.decoder import prompt_ids
from lossyspec.errors import ConfigurationError, EnvironmentProblem, NoFeasiblePoint
from lossyspec.hardware import HardwareInfo, detect_hardware, device_name, supported_precisions, used_gpu
from lossyspec.profile import Profile, user_profile_folder, write_profile
from lossyspec.records import BlockRecord, Front, RunManifest, TrialRecord
from lossyspec.settings import NgramSettings, Sampling, Settings
from lossyspec.versions import versions

from .config import SearchConfig
from .confirmation import Confirmed, build_profile, confirm
from .measurement.costs import CostMeter, CostTable
from .measurement.live import Contestant, measure_blocks
from .models import ModelPool
from .objective import Objective
from .progress import Reporter
from .replay import Replay
from .search_space import SearchSpace, build_space
from .selection import to_confirm
from .store import RunFolder, new_folder, refuse_changes, unfinished_folder
from .study import Limits, Study
from .trace import Texts, Trace, Tracer, load_trace, reference_texts, save_trace
from .workloads import Item, Workload, load_workload

#: share of the machine that others may use before the numbers are called disturbed
_BUSY_SHARE = 0.25
_MIN_BLOCKS, _MAX_BLOCKS = 6, 32
_LIVE_SHARE = 0.5
_FREE_ON_RESUME = ("budget_s", "trials", "strict", "storage")


@dataclass(frozen=True)
class Result:
    """What a search ends with."""

    folder: Path
    front: Front
    profile: Profile
    manifest: RunManifest


class Search:
    """One search. `stop()` is asked between trials and blocks; once it says yes, the search ends with what it has saved."""

    def __init__(
        self,
        config: SearchConfig,
        reporter: Reporter,
        *,
        out: Path | None = None,
        resume: bool = False,
        command: Sequence[str] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.reporter = reporter
        self.stop = stop
        self.command = tuple(command)
        self.out, self.resume = out, resume
        self.began = monotonic()
        self.timings: dict[str, float] = {}
        self.workload: Workload = load_workload(config.task, config.prompts, config.dataset, config.texts)
        self.sampling: Sampling = config.sampling or self.workload.task.sampling
        self.hardware: HardwareInfo = detect_hardware()
        self.pool = ModelPool(config, reporter.say)
        self.space: SearchSpace = build_space(
            config,
            self.pool.dense,
            self.sampling.temperature == 0,
            supported_precisions(self.hardware),
            self.workload.task.unsuitable,
        )
        #: perplexity ratios are against the target in the widest format of the space
        self.reference = next(name for name in ("fp32", "bf16", "fp16") if name in self.space.precisions)

    # the steps, in order

    def run(self) -> Result:
        """Runs all steps. Raises a LossyspecError with its exit code, or KeyboardInterrupt when `stop` said so."""
        notes = self._check_device()
        self.pool.decoder(self.reference)
        folder, manifest = self._open_folder(notes)
        try:
            return self._steps(folder, manifest)
        except KeyboardInterrupt:
            folder.write_manifest(manifest.model_copy(update={"status": "interrupted", "timings_s": self.timings}))
            raise
        except BaseException:
            folder.write_manifest(manifest.model_copy(update={"status": "failed", "timings_s": self.timings}))
            raise

    def _steps(self, folder: RunFolder, manifest: RunManifest) -> Result:
        traces = self._timed("trace", lambda: self._traces(folder))
        replay = Replay(traces["search"])
        meter = self._meter(traces["search"])
        objective = Objective(replay, meter, self.space.precisions, self.pool.dense)
        self._timed("costs", lambda: self._costs(meter, folder))
        study = self._timed("search", lambda: self._search(objective, folder))
        chosen = to_confirm(study.records, self.config.max_quality_loss)
        self._refuse_infeasible(chosen, study.records)
        blocks = self._timed("live", lambda: self._live(chosen, traces, folder))
        confirmed = self._timed(
            "confirmation",
            lambda: confirm(chosen, blocks, traces, self.pool, self.config.max_quality_loss, self.sampling.temperature),
        )
        manifest = manifest.model_copy(
            update={
                "status": "complete",
                "timings_s": self._rounded(),
                "peak_memory_bytes": peak_memory_bytes(),
                "notes": (*manifest.notes, *confirmed.notes),
            }
        )
        return self._write(folder, manifest, study.records, confirmed)

    def _timed(self, name: str, step: Callable[[], Any]) -> Any:
        began = monotonic()
        try:
            result = step()
        finally:
            self.timings[name] = monotonic() - began
        if self.stop():
            raise KeyboardInterrupt
        return result

    def _rounded(self) -> dict[str, float]:
        return {
            **{name: round(value, 2) for name, value in self.timings.items()},
            "total": round(monotonic() - self.began, 2),
        }

    # before anything runs

    def plan(self) -> dict[str, Any]:
        """What the search would do, for --dry-run; loads no model."""
        return {
            "task": self.config.task,
            "target": self.config.target,
            "draft": self.config.draft,
            "device": device_name(self.hardware),
            "workload": self._workload_note(),
            "sampling": self.sampling.model_dump(),
            "reference_precision": self.reference,
            "space": self.space.describe(),
            "excluded": self.space.excluded,
            "trials": self.config.trials,
            "budget_s": self.config.budget_s,
            "max_quality_loss": self.config.max_quality_loss,
        }

    def _workload_note(self) -> dict[str, Any]:
        return {
            "source": self.workload.source,
            "sha256": self.workload.sha256,
            "search": len(self.workload.search),
            "confirm": len(self.workload.confirm),
            "max_new_tokens": self.config.max_new_tokens,
        }

    def _check_device(self) -> list[str]:
        """Warns of other users of the device; with `strict` refuses to measure beside them."""
        notes = []
        gpu = used_gpu(self.hardware)
        if gpu is not None and gpu.processes:
            notes.append(f"{len(gpu.processes)} other processes use {gpu.name}: speeds are disturbed")
        if gpu is None:
            busy = psutil.cpu_percent(interval=0.5) / 100
            if busy > _BUSY_SHARE:
                notes.append(f"the CPU was {busy:.0%} busy before the search began: speeds may be disturbed")
        for note in notes:
            if self.config.strict:
                raise EnvironmentProblem(f"{note}; end the other work, or leave out --strict")
            self.reporter.say(f"warning: {note}")
        if self.workload.task.unsuitable is not None:
            force = "relaxed all the same (--force)" if self.config.force else "lossless only"
            self.reporter.say(f"task {self.config.task}: {force}; {self.workload.task.unsuitable}")
        return notes

    def _open_folder(self, notes: list[str]) -> tuple[RunFolder, RunManifest]:
        config = self.config.model_dump(mode="json")
        here = self.pool.here()
        if self.resume:
            folder = unfinished_folder(self.out, self.config.task)
            manifest = folder.manifest()
            refuse_changes(manifest.config, config, _FREE_ON_RESUME)
            for name, then, now in (
                ("workload", manifest.workload.get("sha256"), self.workload.sha256),
                ("device", manifest.hardware.get("name"), here.device.name),
                ("target", manifest.target.get("weights_sha256"), here.target.weights_sha256),
            ):
                if then != now:
                    raise ConfigurationError(
                        f"--resume: the {name} is another one ({then} then, {now} now); start a new run instead"
                    )
            self.reporter.say(f"resuming {folder.path}")
            return folder, manifest.model_copy(update={"status": "running"})
        folder = new_folder(self.out, self.config.task)
        hardware = {"name": here.device.name, **self.hardware.model_dump(mode="json")}
        manifest = RunManifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.command,
            task=self.config.task,
            target=here.target.model_dump(mode="json"),
            draft=here.draft.model_dump(mode="json"),
            tokenizer_sha256=here.tokenizer_sha256,
            sampling=self.sampling,
            workload=self._workload_note(),
            hardware=hardware,
            versions=versions(),
            config=config,
            space=self.space.describe(),
            excluded=self.space.excluded,
            seed=self.config.seed,
            notes=tuple(notes),
        )
        folder.write_manifest(manifest)
        self.reporter.say(f"run folder: {folder.path}")
        return folder, manifest

    # trace

    def _traces(self, folder: RunFolder) -> dict[str, Trace]:
        if folder.trace.exists():
            self.reporter.say("trace: from the run folder")
            return load_trace(folder.trace)
        texts = self._sampled_texts()
        tracer = Tracer(self.sampling, None if self.pool.dense else NgramSettings(), self.config.max_draft_length)
        traces: dict[str, Trace] = {}
        count = sum(len(part.prompts) for part in texts.values()) * len(self.space.precisions)
        with self.reporter.steps(
            f"tracing {sum(part.tokens for part in texts.values())} tokens in {', '.join(self.space.precisions)}", count
        ) as step:
            for half, part in texts.items():
                traces[half] = tracer.begin(part, self.reference)
                for precision in self.space.precisions:
                    decoder = self.pool.decoder(precision)
                    draft = getattr(decoder.draft, "runner", None)
                    tracer.add(traces[half], precision, decoder.target, draft, step.advance)
        save_trace(folder.trace, traces)
        return traces

    def _prompts(self, items: Sequence[Item]) -> list[list[int]]:
        tokenizer = self.pool.decoder(self.reference).tokenizer
        return [prompt_ids(tokenizer, item.messages) for item in items]

    def _sampled_texts(self) -> dict[str, Texts]:
        """Texts drawn from the reference target itself for both halves, and the references of the confirmation half."""
        decoder, limit = self.pool.decoder(self.reference), self.config.max_new_tokens
        full = Sampling(temperature=self.sampling.temperature)
        texts: dict[str, Texts] = {}
        for half, items, seed in (("search", self.workload.search, 1), ("confirm", self.workload.confirm, 2)):
            self.reporter.say(f"sampling {len(items)} texts of at most {limit} tokens from the target ({half} half)")
            prompts = self._prompts(items)
            drawn = decoder.generate_ids(
                prompts, limit, seed=1000 * self.config.seed + seed, settings=Settings(draft_length=0), **full.model_dump()
            )
            texts[half] = Texts(
                prompts, [answer.tokens for answer in drawn], [answer.finish_reason == "length" for answer in drawn]
            )
        known = [
            (prompt, item.reference)
            for prompt, item in zip(texts["confirm"].prompts, self.workload.confirm, strict=True)
            if item.reference
        ]
        if known and self.sampling.temperature > 0:
            ids = [decoder.tokenizer(reference, add_special_tokens=False)["input_ids"] for _, reference in known]
            texts["references"] = reference_texts([prompt for prompt, _ in known], ids, limit)
        return texts

    # costs and search

    def _meter(self, trace: Trace) -> CostMeter:
        prompts = trace.texts.prompts
        lengths = sorted(len(prompt) + len(output) // 2 for prompt, output in zip(prompts, trace.texts.outputs, strict=True))
        return CostMeter(
            self.pool.runners,
            prompts,
            lengths[len(lengths) // 2],
            self.sampling,
            self.config.max_draft_length,
            precision=self.reference,
        )

    def _stored_costs(self, meter: CostMeter, folder: RunFolder) -> None:
        """On resume the costs measured before hold for the search; the live runs are measured anew in any case."""
        if folder.costs.exists():
            meter.table = CostTable.read(folder.costs)

    def _costs(self, meter: CostMeter, folder: RunFolder) -> None:
        self._stored_costs(meter, folder)
        cells = [(precision, batch) for batch in self.space.batch_sizes for precision in self.space.precisions]
        with self.reporter.steps(
            f"measuring the cost of a round ({', '.join(self.space.precisions)}; batch "
            f"{', '.join(map(str, self.space.batch_sizes))})",
            len(cells),
        ) as step:
            for precision, batch in cells:
                meter.round_s(precision, batch)
                meter.draft_step_s(precision, batch)
                step.advance()
                if self.stop():
                    break
        meter.table.write(folder.costs)

    def _search(self, objective: Objective, folder: RunFolder) -> Study:
        here, context = self.pool.here(), max(map(len, objective.replay.trace.texts.prompts)) + self.config.max_new_tokens
        limit = _memory_limit_bytes(self.hardware)
        limits = Limits(
            self.config.max_quality_loss, limit, lambda settings, batch: self.pool.memory_bytes(settings, batch, context)
        )
        digest = self.space.digest(
            here.target.weights_sha256 or "",
            here.draft.weights_sha256 or "ngram",
            self.workload.sha256,
            here.device.name,
            str(self.config.max_quality_loss),
            str(self.sampling),
        )
        study = Study(
            self.space,
            objective,
            limits,
            folder.add_trial,
            seed=self.config.seed,
            name=f"{self.config.task}-{digest[:12]}",
            storage=self.config.storage,
            done=folder.trials(),
        )
        if not study.records:
            study.enqueue_baselines()
        share = self.began + (1 - _LIVE_SHARE) * self.config.budget_s
        least = min(self.config.trials, 60)
        with self.reporter.steps(f"searching {self.config.trials} configurations by replay", self.config.trials) as step:
            study.run(
                self.config.trials, lambda: self.stop() or (monotonic() > share and len(study.records) >= least), step.at
            )
        states = [record.state for record in study.records]
        self.reporter.say(
            f"{len(states)} trials: {states.count('complete')} complete, {states.count('infeasible')} over the loss limit, "
            f"{states.count('failed')} failed"
        )
        return study

    def _refuse_infeasible(self, chosen: Sequence[TrialRecord], records: Sequence[TrialRecord]) -> None:
        if chosen:
            return
        scored = [record for record in records if record.quality is not None and record.predicted is not None]
        nearest = min(scored, key=lambda record: sum(max(value, 0.0) for value in record.constraints.values()))
        assert nearest.quality is not None and nearest.predicted is not None
        raise NoFeasiblePoint(
            f"no configuration is within the limits; the nearest one, trial {nearest.number} ({nearest.kind}): "
            f"{nearest.predicted.speedup:.2f}x predicted at {nearest.quality.perplexity_ratio.value - 1:+.2%} perplexity, "
            f"{nearest.reason}"
        )

    # live

    def _live(self, chosen: Sequence[TrialRecord], traces: dict[str, Trace], folder: RunFolder) -> list[BlockRecord]:
        plain = chosen[0]
        limit = self.config.max_new_tokens
        contestants = [
            Contestant(
                str(record.number),
                record.batch_size,
                _named(str(record.number), self.pool.run_settings(record.settings, self.sampling, limit)),
            )
            for record in chosen
        ]
        outside = self.pool.run_transformers(plain.settings.precision.target, self.sampling, limit)
        contestants.append(Contestant("transformers", plain.batch_size, _named("transformers", outside)))
        left = max(self.config.budget_s - (monotonic() - self.began) - 10.0, 0.0)
        with self.reporter.steps(
            f"measuring {len(chosen)} points live against plain decoding and transformers, interleaved",
            _MAX_BLOCKS * len(contestants),
        ) as step:

            def keep(record: BlockRecord) -> None:
                folder.add_block(record)
                step.advance()

            return measure_blocks(
                contestants,
                traces["confirm"].texts.prompts,
                budget_s=left,
                min_blocks=_MIN_BLOCKS,
                max_blocks=_MAX_BLOCKS,
                seed=self.config.seed,
                on_run=keep,
                stop=self.stop,
                done=folder.blocks(),
            )

    # the end

    def _write(
        self, folder: RunFolder, manifest: RunManifest, records: Sequence[TrialRecord], confirmed: Confirmed
    ) -> Result:
        front = confirmed.front
        folder.write_front(front)
        profile = build_profile(manifest, self.pool.here(), confirmed, records)
        profile = write_profile(folder.profile, profile)
        assert profile.id is not None
        kept = user_profile_folder() / f"{profile.match.device.name}-{profile.task}-{profile.id[7:15]}.json"
        write_profile(kept, profile)
        folder.write_manifest(manifest)
        return Result(folder.path, front, profile, manifest)


def _named(name: str, run: Callable[[list[list[int]], int], BlockRecord]) -> Callable[[list[list[int]], int], BlockRecord]:
    return lambda prompts, seed: run(prompts, seed).model_copy(update={"contestant": name})


def _memory_limit_bytes(info: HardwareInfo) -> int | None:
    gpu = used_gpu(info)
    if gpu is not None:
        return gpu.memory_bytes
    known = [value for value in (info.cpu.memory_bytes, info.cpu.memory_limit_bytes) if value]
    return min(known) if known else None


def peak_memory_bytes() -> int:
    """Most memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
