"""Which draft a name means: prompt lookup, a feature head, or a model, with the target's tokenizer or another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .drafting import Draft, ModelDraft, NgramDraft
from .errors import ConfigurationError
from .head_drafting import FeatureDraft
from .head_files import embedded_head, head_identity, is_head, load_head
from .loading import LoadedModel, load, same_tokenizer
from .profile import ModelIdentity
from .runner import Runner
from .settings import QUANTISED, Precision
from .text_drafting import make_text_draft

if TYPE_CHECKING:
    from .feature_head import FeatureHead

#: names that are no model
NGRAM, HEAD, AUTO = "ngram", "head", "auto"


@dataclass(frozen=True)
class LoadedHead:
    """A feature head and its identity. precision: it has the dtype of its target; quantised, it is int8 itself."""

    head: FeatureHead
    identity: dict[str, Any]
    precision: Precision = "fp32"


LoadedDraft = LoadedModel | LoadedHead | None


def _head_folder(name: str) -> Path | None:
    """The folder of a head by name; None when the name means something else."""
    if name == HEAD:
        folder = embedded_head()
        if folder is None:
            raise ConfigurationError("this installation has no draft head for the embedded target; use --draft ngram")
        return folder
    return Path(name) if is_head(Path(name)) else None


def names_head(name: str) -> bool:
    """Whether a draft's name means a feature head."""
    return name == HEAD or is_head(Path(name))


def automatic(target_name: str) -> str:
    """What `auto` means for a target: the head that ships for the embedded one, else prompt lookup."""
    return HEAD if target_name == "embedded" and embedded_head() is not None else NGRAM


def load_draft(name: str, target: LoadedModel, precision: Precision) -> LoadedDraft:
    """Loads a draft for a target; None is prompt lookup. Raises ConfigurationError when the two do not go together."""
    if name == AUTO:
        name = automatic(target.identity["id"])
    if name == NGRAM:
        return None
    folder = _head_folder(name)
    if folder is not None:
        return LoadedHead(load_head(folder, target), head_identity(folder), precision)
    return load(name, precision, role="draft")


def draft_identity(draft: LoadedDraft) -> ModelIdentity:
    """What profiles call the draft."""
    if draft is None:
        return ModelIdentity(kind="ngram", id=NGRAM)
    return ModelIdentity(kind="head" if isinstance(draft, LoadedHead) else "model", **draft.identity)


def draft_name(identity: ModelIdentity) -> str:
    """The name that loads the draft of a profile again."""
    if identity.kind == "ngram":
        return NGRAM
    return HEAD if identity.kind == "head" and identity.id == "embedded" else identity.id


def make_draft(draft: LoadedDraft, target: Runner, vocab_size: int, tokenizer: Any) -> Draft:
    """The draft that the loop talks to; tokenizer: the target's. A head makes the target keep its features."""
    if draft is None:
        return NgramDraft(device=target.device)
    if isinstance(draft, LoadedHead):
        return FeatureDraft(draft.head, target.model, vocab_size, draft.precision in QUANTISED)
    if not same_tokenizer(tokenizer, draft.tokenizer):
        return make_text_draft(draft, tokenizer, vocab_size)
    return ModelDraft(Runner(draft.model, "draft", vocab_size, draft.stack), vocab_size)
