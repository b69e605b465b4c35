"""A feature head on the disk: head.safetensors (fp16), head.json (sizes), card.json (its target, and how good it is)."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigurationError
from .records import write_text
from .tensor_files import read_tensors, write_tensors

if TYPE_CHECKING:
    from .feature_head import FeatureHead
    from .loading import LoadedModel

SCHEMA = "lossytune.head/1"
EMBEDDED_HEAD = "embedded_draft"


def is_head(folder: Path) -> bool:
    """Whether a folder holds a feature head."""
    return (folder / "head.json").is_file()


def embedded_head() -> Path | None:
    """The folder of the head that ships for the embedded target; None when this installation has none."""
    folder = Path(str(resources.files("lossyspec"))) / EMBEDDED_HEAD
    return folder if is_head(folder) else None


def save_head(folder: Path, head: FeatureHead, card: dict[str, Any]) -> None:
    """Writes the head. `card` must hold `target`, the identity of the model it was trained for."""
    import torch

    state = {
        name: value.to(torch.int32) if name == "token_map" else value.half() for name, value in head.state_dict().items()
    }
    write_tensors(folder / "head.safetensors", {name: value.contiguous() for name, value in state.items()})
    write_text(folder / "card.json", json.dumps(card, indent=2) + "\n")
    write_text(folder / "head.json", json.dumps({"schema": SCHEMA, "shape": asdict(head.shape)}, indent=2) + "\n")


def read_card(folder: Path) -> dict[str, Any]:
    """The card. Raises ConfigurationError for a folder without a readable one."""
    try:
        card: dict[str, Any] = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        card["target"]["weights_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConfigurationError(f"{folder}: not a draft head, its card.json cannot be read ({problem})") from None
    return card


def load_head(folder: Path, target: LoadedModel) -> FeatureHead:
    """Reads a head for this target. Raises ConfigurationError when it was trained for another one, naming both."""
    import torch

    from .feature_head import FeatureHead, HeadShape

    card = read_card(folder)
    for field in ("config_sha256", "weights_sha256"):
        if card["target"].get(field) != target.identity.get(field):
            raise ConfigurationError(
                f"draft head {folder} was trained for {card['target'].get('id')} ({field} "
                f"{str(card['target'].get(field))[:12]}..), not for {target.identity['id']} "
                f"({str(target.identity.get(field))[:12]}..); make one with: "
                f"lossytune distill --target {target.identity['id']}"
            )
    try:
        note = json.loads((folder / "head.json").read_text(encoding="utf-8"))
        if note.get("schema") != SCHEMA:
            raise ConfigurationError(f"{folder}: schema is {note.get('schema')!r}; expected {SCHEMA!r}")
        state, _ = read_tensors(folder / "head.safetensors")
        head = FeatureHead(HeadShape(**note["shape"]), state["token_map"].long())
        head.load_state_dict({name: value.float() if name != "token_map" else value.long() for name, value in state.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as problem:
        raise ConfigurationError(f"{folder}: the draft head cannot be read ({problem})") from None
    return head.to(dtype=torch.float32)


def head_identity(folder: Path) -> dict[str, Any]:
    """id, config_sha256 and weights_sha256 of a head, as models have them."""
    from .loading import file_sha256

    return {
        "id": str(folder) if folder.name != EMBEDDED_HEAD else "embedded",
        "revision": None,
        "config_sha256": file_sha256(folder / "head.json"),
        "weights_sha256": file_sha256(folder / "head.safetensors"),
    }
