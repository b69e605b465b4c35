"""lossyspec: a lossy speculative decoder that loads a tuned profile. Importing it does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answers import Completion, Generation, Piece
    from .decoder import Decoder
    from .guard import Guard
    from .handle import Handle
    from .profile import Match, Profile
    from .serving import Batcher
    from .session import Session
    from .settings import Policy, Recovery, Sampling, Settings

_LAZY = {
    "Batcher": "serving",
    "Completion": "answers",
    "Decoder": "decoder",
    "Generation": "answers",
    "Guard": "guard",
    "Handle": "handle",
    "Piece": "answers",
    "Match": "profile",
    "Policy": "settings",
    "Profile": "profile",
    "Recovery": "settings",
    "Sampling": "settings",
    "Session": "session",
    "Settings": "settings",
}

__all__ = [
    "Batcher",
    "Completion",
    "Decoder",
    "Generation",
    "Guard",
    "Handle",
    "Match",
    "Piece",
    "Policy",
    "Profile",
    "Recovery",
    "Sampling",
    "Session",
    "Settings",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
