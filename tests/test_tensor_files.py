"""Tensor files: whole or not at all, and one error on purpose wherever they are missing, damaged or cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from lossyspec.errors import ConfigurationError, EnvironmentProblem
from lossyspec.tensor_files import read_tensors, write_tensors


def test_tensors_and_metadata_survive_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.safetensors"
    write_tensors(path, {"a": torch.arange(3), "b": torch.zeros(2, 2)}, {"step": "4"})
    tensors, metadata = read_tensors(path)
    assert tensors["a"].tolist() == [0, 1, 2] and metadata == {"step": "4"}
    assert list(read_tensors(path, "b")[0]) == ["b"]
    assert [entry.name for entry in path.parent.iterdir()] == ["x.safetensors"]


def test_a_file_cut_off_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.arange(3)})
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ConfigurationError, match=r"x\.safetensors: damaged, or no safetensors file"):
            read_tensors(path)


def test_a_missing_file_or_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.safetensors: no such file"):
        read_tensors(tmp_path / "none.safetensors")
    write_tensors(tmp_path / "x.safetensors", {"a": torch.arange(3)})
    with pytest.raises(ConfigurationError, match=r"x\.safetensors: .*\bb\b"):
        read_tensors(tmp_path / "x.safetensors", "b")


@pytest.mark.parametrize("full", [SafetensorError("No space left on device"), OSError(28, "No space left on device")])
def test_a_full_disk_leaves_the_old_file_whole_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: Exception
) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.arange(3)})

    def fails(tensors: Any, place: Path, metadata: Any = None) -> None:
        place.write_bytes(b"half")
        raise full

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(EnvironmentProblem, match=r"x\.safetensors: cannot be written \(No space left on device\)"):
        write_tensors(path, {"a": torch.arange(4)})
    assert len(read_tensors(path)[0]["a"]) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"file/x\.safetensors: cannot be written"):
        write_tensors(tmp_path / "file" / "x.safetensors", {"a": torch.arange(3)})
