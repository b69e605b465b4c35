"""The profile of another point of a front than the recommended one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from lossyspec.errors import ConfigurationError
from lossyspec.profile import Profile, read_profile
from lossyspec.records import Front, read_record
from lossyspec.settings import ScheduleRow

from .confirmation import evidence_of
from .store import RunFolder


def pick(folder: Path, trial: int) -> Profile:
    """The profile of the point of a run's front with this trial number, with its own evidence; not written yet.

    It drafts at batch sizes up to the measured one; larger batches decode plainly, since nothing is known of them. Raises
    ConfigurationError for a run without a profile, for a number that the front does not have, and for a point that was not
    measured live.
    """
    run = RunFolder(folder)
    if not run.profile.is_file():
        raise ConfigurationError(f"{folder}: no profile.json; only a run that ended has points to pick from")
    profile, front = read_profile(run.profile), read_record(folder / "front.json", Front)
    point = next((point for point in front.points if point.trial == trial), None)
    if point is None or point.measured is None:
        measured = ", ".join(f"{point.trial} ({point.kind})" for point in front.points if point.measured)
        raise ConfigurationError(f"--trial is {trial}; the measured points of {folder} are {measured}")
    rows = (ScheduleRow(batch=(1, point.batch_size), draft_length=point.settings.draft_length),)
    return profile.model_copy(
        update={
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": point.settings.model_copy(update={"schedule": rows}),
            "evidence": evidence_of(point, front, profile.evidence.memory_peak_bytes),
        }
    )
