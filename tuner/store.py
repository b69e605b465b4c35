"""A run folder: what a search writes, and what it finds there when it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from lossyspec.errors import ConfigurationError, EnvironmentProblem
from lossyspec.records import (
    BlockRecord,
    Front,
    RunManifest,
    TrialRecord,
    append_record,
    read_record,
    read_records,
    write_record,
)


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run, and reading and writing its records."""

    path: Path

    @property
    def trace(self) -> Path:
        """trace.safetensors"""
        return self.path / "trace.safetensors"

    @property
    def costs(self) -> Path:
        """costs.json"""
        return self.path / "costs.json"

    @property
    def profile(self) -> Path:
        """profile.json"""
        return self.path / "profile.json"

    @property
    def manifest_path(self) -> Path:
        """manifest.json"""
        return self.path / "manifest.json"

    def manifest(self) -> RunManifest:
        """Reads the manifest."""
        return read_record(self.manifest_path, RunManifest)

    def write_manifest(self, manifest: RunManifest) -> None:
        """Writes the manifest, atomically."""
        write_record(self.manifest_path, manifest)

    def trials(self) -> tuple[TrialRecord, ...]:
        """All trials on the disk."""
        return tuple(read_records(self.path / "trials.jsonl", TrialRecord))

    def add_trial(self, record: TrialRecord) -> None:
        """Appends a trial and waits until it is on the disk."""
        append_record(self.path / "trials.jsonl", record)

    def blocks(self) -> tuple[BlockRecord, ...]:
        """All live runs on the disk."""
        return tuple(read_records(self.path / "measurements.jsonl", BlockRecord))

    def add_block(self, record: BlockRecord) -> None:
        """Appends a live run."""
        append_record(self.path / "measurements.jsonl", record)

    def write_front(self, front: Front) -> None:
        """Writes front.json, atomically."""
        write_record(self.path / "front.json", front)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keeps other searches out of a run folder. Raises EnvironmentProblem when one is in it, or it cannot be written to."""
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise EnvironmentProblem(f"{path}: another search is using it; wait for it, or give another --out") from None
    try:
        yield
    finally:
        lock.release()
        (path / ".lock").unlink(missing_ok=True)
        with suppress(OSError):  # a search that was refused leaves no empty folder
            path.rmdir()


def new_folder(out: Path | None, task: str, root: Path = Path("runs")) -> RunFolder:
    """A new run folder: `out`, or runs/<time>-<task>. Raises ConfigurationError when it holds a run already."""
    path = out or root / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{task}"
    refuse_used(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--out {path}: cannot be made ({error.strerror})") from None
    return RunFolder(path)


def refuse_used(path: Path) -> None:
    """Raises ConfigurationError for a folder that holds a run, or cannot be one."""
    if (path / "manifest.json").exists():
        raise ConfigurationError(f"{path} holds a run already; go on with --resume, or give another --out")
    if path.exists() and not path.is_dir():
        raise ConfigurationError(f"--out {path}: cannot be made (it is no folder)")


def unfinished_folder(out: Path | None, task: str, root: Path = Path("runs")) -> RunFolder:
    """The run to resume: `out`, or the newest unfinished one of the task. Raises ConfigurationError when there is none."""
    if out is not None:
        if not (out / "manifest.json").is_file():
            raise ConfigurationError(f"--resume: {out} holds no run (no manifest.json)")
        return RunFolder(out)
    for manifest in sorted(root.glob(f"*-{task}/manifest.json"), reverse=True):
        folder = RunFolder(manifest.parent)
        if folder.manifest().status != "complete":
            return folder
    raise ConfigurationError(f"--resume: no unfinished run of task {task!r} under {root}/")


def refuse_changes(stored: dict[str, object], now: dict[str, object], free: Sequence[str]) -> None:
    """Raises ConfigurationError naming each option that a resumed run would change; those in `free` may differ."""
    changed = [
        f"{name}: {stored.get(name)!r} then, {now.get(name)!r} now"
        for name in sorted(set(stored) | set(now))
        if name not in free and stored.get(name) != now.get(name)
    ]
    if changed:
        raise ConfigurationError("--resume with other options: " + "; ".join(changed) + "; start a new run instead")
