"""Reads a run folder (manifest, trials, front, live runs, cost table) into one immutable `Run`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lossyspec.cost_table import CostTable
from lossyspec.errors import ConfigurationError
from lossyspec.records import BlockRecord, Front, FrontPoint, RunManifest, TrialRecord, read_record, read_records

NO_REASON = "no reason recorded"


@dataclass(frozen=True)
class Counts:
    """How the trials of the search ended."""

    complete: int
    failed: int
    infeasible: int

    @property
    def total(self) -> int:
        """All recorded trials."""
        return self.complete + self.failed + self.infeasible


@dataclass(frozen=True)
class Run:
    """What a run folder holds. `front` is None when the run ended before its points were confirmed.

    blocks: the live runs, the last of each contestant in each block. costs: None when the folder has no cost table.
    """

    folder: Path
    manifest: RunManifest
    trials: tuple[TrialRecord, ...]
    front: Front | None
    blocks: tuple[BlockRecord, ...] = ()
    costs: CostTable | None = None

    @property
    def device(self) -> str:
        """Name of the device that the run was made on."""
        return machine_name(self.manifest.hardware)

    @property
    def made_up(self) -> str | None:
        """How the run came about when it was not measured, as its configuration says; None for a measured one."""
        said = self.manifest.config.get("made_up")
        return str(said) if said else None

    @property
    def points(self) -> tuple[FrontPoint, ...]:
        """The points of the front in stored order (fastest last); empty without a front."""
        return self.front.points if self.front else ()

    @property
    def recommended(self) -> FrontPoint | None:
        """The recommended point, or None."""
        return next((point for point in self.points if point.recommended), None)

    @property
    def counts(self) -> Counts:
        """Trials by their state."""
        states = [trial.state for trial in self.trials]
        return Counts(states.count("complete"), states.count("failed"), states.count("infeasible"))

    @property
    def loss_limit(self) -> float | None:
        """Allowed loss as a share (0.05: perplexity ratio up to 1.05); from the configuration without a front."""
        if self.front:
            return self.front.max_quality_loss
        value = self.manifest.config.get("max_quality_loss")
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def verdict(self) -> str:
        """The verdict in words: the stored one, or what can be said without a front."""
        return self.front.verdict if self.front else _unfinished(self)

    def reasons(self, state: str) -> list[tuple[str, int]]:
        """Why trials of this state ended so, commonest first; reasons that differ in numbers only count as one."""
        groups: dict[str, list[str]] = {}
        for trial in self.trials:
            if trial.state == state:
                reason = _reason(trial)
                groups.setdefault(re.sub(r"\d+(\.\d+)?", "#", reason), []).append(reason)
        return sorted(((found[0], len(found)) for found in groups.values()), key=lambda item: -item[1])


def load_run(folder: Path) -> Run:
    """Reads a run folder; raises ConfigurationError naming the file that is missing or broken."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such run folder")
    manifest = read_record(folder / "manifest.json", RunManifest)
    trials = tuple(read_records(folder / "trials.jsonl", TrialRecord))
    front_path = folder / "front.json"
    front = read_record(front_path, Front) if front_path.exists() else None
    blocks = {
        (record.block, record.contestant): record for record in read_records(folder / "measurements.jsonl", BlockRecord)
    }  # a block that was cut off and run again is stored twice
    costs_path = folder / "costs.json"
    costs = CostTable.read(costs_path) if costs_path.exists() else None
    return Run(folder, manifest, trials, front, tuple(blocks.values()), costs)


def machine_name(hardware: dict[str, Any]) -> str:
    """Name of the device a run was made on, as far as the manifest says."""
    return _first_text(hardware, ("device", "accelerator", "gpu", "cpu")) or "unknown machine"


def model_name(model: dict[str, Any]) -> str:
    """Name of a target or draft model, as far as the manifest says."""
    return _first_text(model, ()) or "unknown model"


def pair_name(target: dict[str, Any], draft: dict[str, Any], paths: bool = True) -> str:
    """Names of a target and its draft in one phrase. paths: False leaves the folders out of them."""
    names = [model_name(model) for model in (target, draft)]
    if not paths:
        names = [name.rstrip("/").rpartition("/")[2] for name in names]
    own = names[0] == names[1] and target.get("weights_sha256") != draft.get("weights_sha256")
    return f"{names[0]} with {'a head of its own' if own else names[1]}"


def _first_text(data: dict[str, Any], nested: tuple[str, ...]) -> str | None:
    """The first text under a naming key, here or inside the `nested` keys."""
    for key in ("name", "id", "model", "path", "kind"):
        if isinstance(data.get(key), str) and data[key]:
            return str(data[key])
    for key in nested:
        value = data.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, dict) and (found := _first_text(value, ())):
            return found
    return None


def flatten(data: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) for every leaf of nested dictionaries, in stored order."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, (*prefix, str(key)))
        else:
            yield (*prefix, str(key)), value


def _reason(trial: TrialRecord) -> str:
    """One line: the recorded reason, else the constraints that are over their limit."""
    if trial.reason and trial.reason.strip():
        return trial.reason.strip().splitlines()[0].strip()
    broken = [name for name, value in trial.constraints.items() if value > 0]
    return f"over the limit: {', '.join(broken)}" if broken else NO_REASON


def _unfinished(run: Run) -> str:
    """The verdict of a run without a front."""
    counts = run.counts
    if not counts.total:
        said = "No trial was recorded"
    elif counts.failed == counts.total:
        reason, count = run.reasons("failed")[0]
        said = f"All {counts.total} trials failed ({count} of them: {reason})"
    else:
        said = (
            f"{counts.complete} trials are complete, {counts.infeasible} infeasible, {counts.failed} failed; "
            "their speed-ups are predictions"
        )
    status = run.manifest.status
    state = {"running": "The run has not finished", "complete": "The run has no front"}.get(status, f"Run {status}")
    return f"{state}: {said}. No point was confirmed by a live measurement, so nothing is recommended."
