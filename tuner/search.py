"""The main job from end to end: workload, trace, costs, search, live confirmation, profile. Each step is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from lossyspec.cpu import peak_memory_bytes
from lossyspec.drafts import AUTO, automatic
from lossyspec.errors import ConfigurationError, EnvironmentProblem, NoFeasiblePoint
from lossyspec.hardware import HardwareInfo, detect_hardware, device_name, supported_precisions, used_gpu
from lossyspec.profile import Profile, kept_path, write_profile
from lossyspec.records import Front, RunManifest, TrialRecord
from lossyspec.settings import PRECISIONS, QUANTISED, Sampling
from lossyspec.versions import versions

from .config import SearchConfig
from .confirmation import Confirmed, build_profile, confirm
from .models import ModelPool
from .objective import Objective
from .preflight import FREE_ON_RESUME, refuse_at_start
from .progress import Reporter
from .replay import Replay
from .screening import fastest_dense, narrow
from .search_space import SearchSpace, build_space
from .selection import to_confirm
from .sparse_choices import narrow_attentions, offer
from .stages import (
    make_meter,
    make_traces,
    measure_costs,
    measure_live,
    search_trials,
    trace_chosen,
)
from .store import RunFolder, held, new_folder, refuse_changes, unfinished_folder
from .texts import middle_context, texts_in_budget
from .work import Work
from .workloads import MOST_TEXTS, Workload, load_workload

#: share of the machine that others may use before the numbers are called disturbed
_BUSY_SHARE = 0.25


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
        if config.draft == AUTO:
            config = config.model_copy(update={"draft": automatic(config.target)})
        self.config = config
        self.reporter = reporter
        self.stop = stop
        self.command = tuple(command)
        self.out, self.resume = out, resume
        self.began = monotonic()
        self.timings: dict[str, float] = {}
        self.workload: Workload = load_workload(config.task, config.prompts, config.dataset, config.texts or MOST_TEXTS)
        self.sampling: Sampling = config.sampling or self.workload.task.sampling
        self.hardware: HardwareInfo = detect_hardware()
        self.pool = ModelPool(config, reporter.say)
        self.space: SearchSpace = build_space(
            config,
            self.pool.taus,
            self.sampling.temperature == 0,
            supported_precisions(self.hardware),
            self.workload.task.unsuitable,
        )
        self.space = offer(self.space, config)
        #: perplexity ratios are against the target in the widest format of the space
        self.reference = next(name for name in PRECISIONS if name in self.space.precisions)
        self.work = Work(
            config,
            self.workload,
            self.sampling,
            self.hardware,
            self.pool,
            self.space,
            self.reference,
            reporter,
            stop,
            self.began,
        )

    # the steps, in order

    def run(self) -> Result:
        """Runs all steps. Raises a LossyspecError with its exit code, or KeyboardInterrupt when `stop` said so."""
        refuse_at_start(self.config, self.out, self.resume)
        folder = unfinished_folder(self.out, self.config.task) if self.resume else new_folder(self.out, self.config.task)
        with held(folder.path):
            return self._run_in(folder)

    def _run_in(self, folder: RunFolder) -> Result:
        notes = self._check_device()
        self.pool.decoder(self.reference)
        self._narrow(folder)
        manifest = self._open(folder, notes)
        try:
            return self._steps(folder, manifest)
        except KeyboardInterrupt:
            folder.write_manifest(manifest.model_copy(update={"status": "interrupted", "timings_s": self.timings}))
            raise
        except BaseException:
            folder.write_manifest(manifest.model_copy(update={"status": "failed", "timings_s": self.timings}))
            raise

    def _steps(self, folder: RunFolder, manifest: RunManifest) -> Result:
        traces = self._timed("trace", lambda: make_traces(self.work, folder))
        replay = Replay(traces["search"])
        meter = make_meter(self.work, traces["search"])
        objective = Objective(replay, meter, self.space.precisions, self.pool.dense, self.space.compiles)
        self._timed("costs", lambda: measure_costs(self.work, meter, folder))
        study = self._timed("search", lambda: search_trials(self.work, objective, folder))
        chosen = to_confirm(study.records, self.config.max_quality_loss, replay.upper_ratio)
        self._refuse_infeasible(chosen, study.records)
        self._timed("trace_confirm", lambda: trace_chosen(self.work, traces, chosen, folder))
        blocks = self._timed("live", lambda: measure_live(self.work, chosen, traces, folder))
        confirmed = self._timed(
            "confirmation",
            lambda: confirm(chosen, blocks, traces, self.pool, self.config.max_quality_loss, self.sampling.temperature),
        )
        manifest = manifest.model_copy(
            update={
                "status": "complete",
                "energy": self.pool.energy.note,
                "timings_s": self._rounded(),
                "peak_memory_bytes": peak_memory_bytes(),
                "notes": (*manifest.notes, *confirmed.notes),
            }
        )
        return self._write(folder, manifest, study.records, confirmed, objective)

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
        """What the search would do, for --dry-run; loads no model. Refuses what the search would refuse at its start."""
        refuse_at_start(self.config, self.out, self.resume)
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

    def _narrow(self, folder: RunFolder) -> None:
        """Leaves out the precisions and attentions that cannot win here; on resume, those that the run had left out."""
        if self.resume:
            stored = folder.manifest()
            self.space = self.space.as_stored(stored.space, stored.excluded)
            self.pool.outside = stored.transformers_precision or self.pool.outside
        elif self.config.precisions is None:
            self.space = narrow(self.space, self.pool, self.reference, self.reporter.say)
        elif set(self.space.precisions) & set(QUANTISED):
            self.pool.outside = fastest_dense(self.pool, self.hardware, self.space.precisions)
        if not self.resume and self.space.attentions != ("dense",):
            self.space = narrow_attentions(self.space, self.pool, middle_context(self.work), self.reporter.say)
        self.work = replace(self.work, space=self.space)
        if self.resume:
            self.workload = self.workload.first(folder.manifest().workload["search"])
        elif self.config.texts is None:
            self.workload = self.workload.first(texts_in_budget(self.work))
        self.work = replace(self.work, workload=self.workload)

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

    def _open(self, folder: RunFolder, notes: list[str]) -> RunManifest:
        config = self.config.model_dump(mode="json")
        here = self.pool.here()
        if self.resume:
            manifest = folder.manifest()
            refuse_changes(manifest.config, config, FREE_ON_RESUME)
            for name, then, now in (
                ("workload", manifest.workload.get("sha256"), self.workload.sha256),
                ("device", manifest.hardware.get("name"), here.device.name),
                ("target", manifest.target.get("weights_sha256"), here.target.weights_sha256),
                ("CPU's kernel", manifest.versions.get("cpu_kernels"), here.versions.get("cpu_kernels")),
            ):
                if then != now:
                    raise ConfigurationError(
                        f"--resume: the {name} is another one ({then} then, {now} now); start a new run instead"
                    )
            self.reporter.say(f"resuming {folder.path}")
            return manifest.model_copy(update={"status": "running"})
        hardware = {"name": here.device.name, **self.hardware.model_dump(mode="json")}
        manifest = RunManifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.command,
            task=self.config.task,
            target=here.target.model_dump(mode="json"),
            draft=here.draft.model_dump(mode="json"),
            tokenizer_sha256=here.tokenizer_sha256,
            **self.pool.sizes(),
            transformers_precision=self.pool.outside,
            sampling=self.sampling,
            workload=self._workload_note(),
            hardware=hardware,
            versions=versions() | here.versions,
            config=config,
            space=self.space.describe(),
            excluded=self.space.excluded,
            seed=self.config.seed,
            notes=tuple(notes),
        )
        folder.write_manifest(manifest)
        self.reporter.say(f"run folder: {folder.path}")
        return manifest

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

    # the end

    def _write(
        self,
        folder: RunFolder,
        manifest: RunManifest,
        records: Sequence[TrialRecord],
        confirmed: Confirmed,
        objective: Objective,
    ) -> Result:
        front = confirmed.front
        folder.write_front(front)
        profile = build_profile(manifest, self.pool.here(), confirmed, records, objective)
        profile = write_profile(folder.profile, profile)
        write_profile(kept_path(profile), profile)
        folder.write_manifest(manifest)
        return Result(folder.path, front, profile, manifest)
