"""Where files are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Of what can be made again, as converted models and compiled code: LOSSYTUNE_CACHE, else the user's cache folder."""
    return Path(os.environ.get("LOSSYTUNE_CACHE") or platformdirs.user_cache_dir("lossytune"))
