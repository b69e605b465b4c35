"""What can be refused before a model is loaded: folders, names, and options that a resumed run would change."""

from __future__ import annotations

from pathlib import Path

from lossyspec.drafts import NGRAM, names_head, names_self
from lossyspec.loading import check_name

from .config import SearchConfig
from .store import refuse_changes, refuse_used, unfinished_folder

FREE_ON_RESUME = ("budget_s", "trials", "strict", "storage")


def refuse_at_start(config: SearchConfig, out: Path | None, resume: bool) -> None:
    """Raises ConfigurationError for what a search with these options would refuse at its start; writes nothing."""
    if resume:
        stored = unfinished_folder(out, config.task).manifest()
        refuse_changes(stored.config, config.model_dump(mode="json"), FREE_ON_RESUME)
    elif out is not None:
        refuse_used(out)
    check_name(config.target)
    if config.draft != NGRAM and not names_head(config.draft) and not names_self(config.draft):
        check_name(config.draft)
