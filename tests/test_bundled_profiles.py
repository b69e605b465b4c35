"""The profiles that ship: measured, whole, and tuned with the draft head that ships beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

import lossyspec.hardware_profiles
from lossyspec.head_files import embedded_head, head_identity
from lossyspec.profile import Here, choose, read_profile
from lossyspec.tuner.workloads import TASKS, load_workload

FOLDER = Path(lossyspec.hardware_profiles.__path__[0])
PROFILES = sorted(path for path in FOLDER.glob("*.json") if path.name != "accelerators.json")


def test_some_ship() -> None:
    assert PROFILES


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_that_ships_is_a_measured_one_of_what_ships(path: Path) -> None:
    profile = read_profile(path)  # its id is the hash of its content
    assert path.stem == f"{profile.match.device.name}-{profile.task}" and profile.task in TASKS
    assert profile.provenance.source == "measured"
    assert profile.evidence.speedup.ci95 is not None and profile.evidence.quality.perplexity_ratio.ci95 is not None
    assert profile.provenance.workload["sha256"] == load_workload(profile.task).sha256
    head = embedded_head()
    assert head is not None and profile.match.target.id == "embedded"
    # a new head needs new profiles: acceptance and alpha were found with the old one
    assert profile.match.draft.model_dump(exclude={"kind"}) == head_identity(head)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_it_is_chosen_on_its_own_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossyspec.profile.bundled_files", lambda: PROFILES)
    profile = read_profile(path)
    match = profile.match
    here = Here(match.device, match.target, match.draft, match.tokenizer_sha256, dict(match.versions))
    chosen, how = choose(here, profile.task)
    assert chosen == profile and how.level == "exact"
