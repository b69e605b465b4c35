"""Which draft a name means: prompt lookup, the target itself, a feature head, or a model, with any tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .drafting import Draft, ModelDraft
from .errors import ConfigurationError, nearest
from .head_drafting import FeatureDraft
from .head_files import embedded_head, head_identity, is_head, load_head
from .loading import LoadedModel, load, same_tokenizer
from .ngram_drafting import NgramDraft
from .profile import ModelIdentity
from .runner import Runner
from .self_drafting import SelfDraft
from .settings import PRECISIONS, QUANTISED, Precision
from .text_drafting import make_text_draft

if TYPE_CHECKING:
    from .feature_head import FeatureHead

#: names that are no model
NGRAM, HEAD, SELF, AUTO = "ngram", "head", "self", "auto"


@dataclass(frozen=True)
class LoadedHead:
    """A feature head and its identity. precision: it has the dtype of its target; quantised, it is int8 itself."""

    head: FeatureHead
    identity: dict[str, Any]
    precision: Precision = "fp32"


@dataclass(frozen=True)
class TargetItself:
    """The draft `self`: the target over a few blocks of its own cache. model: the same in another precision, as in
    `self:int4`; None: the target as it is."""

    model: LoadedModel | None = None

    @property
    def name(self) -> str:
        """`self`, or with its precision."""
        return SELF if self.model is None else f"{SELF}:{self.model.precision}"


LoadedDraft = LoadedModel | LoadedHead | TargetItself | None


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


def names_self(name: str) -> bool:
    """Whether a draft's name means the target itself."""
    return name.partition(":")[0] == SELF


def _itself(name: str, target: LoadedModel) -> TargetItself:
    """The target as its own draft, in its own precision or in the one that the name ends with."""
    precision = name.partition(":")[2] or target.precision
    if precision == target.precision:
        return TargetItself()
    if precision not in PRECISIONS:
        raise ConfigurationError(
            f"draft is {name!r}; allowed: {SELF}, or {SELF}:PRECISION with one of {', '.join(PRECISIONS)}."
            f"{nearest(precision, PRECISIONS)}"
        )
    return TargetItself(load(target.identity["id"], precision, role="draft"))


def automatic(target_name: str) -> str:
    """What `auto` means for a target: the head that ships for the embedded one, else prompt lookup."""
    return HEAD if target_name == "embedded" and embedded_head() is not None else NGRAM


def load_draft(name: str, target: LoadedModel, precision: Precision) -> LoadedDraft:
    """Loads a draft for a target; None is prompt lookup. Raises ConfigurationError when the two do not go together."""
    if name == AUTO:
        name = automatic(target.identity["id"])
    if name == NGRAM:
        return None
    if names_self(name):
        return _itself(name, target)
    folder = _head_folder(name)
    if folder is not None:
        return LoadedHead(load_head(folder, target), head_identity(folder), precision)
    return load(name, precision, role="draft")


def draft_identity(draft: LoadedDraft) -> ModelIdentity:
    """What profiles call the draft."""
    if draft is None:
        return ModelIdentity(kind="ngram", id=NGRAM)
    if isinstance(draft, TargetItself):
        return ModelIdentity(kind="self", id=draft.name)
    return ModelIdentity(kind="head" if isinstance(draft, LoadedHead) else "model", **draft.identity)


def draft_name(identity: ModelIdentity) -> str:
    """The name that loads the draft of a profile again."""
    if identity.kind == "ngram":
        return NGRAM
    if identity.kind == "self":
        return identity.id
    return HEAD if identity.kind == "head" and identity.id == "embedded" else identity.id


def make_draft(draft: LoadedDraft, target: Runner, vocab_size: int, tokenizer: Any) -> Draft:
    """The draft that the loop talks to; tokenizer: the target's. A head makes the target keep its features."""
    if draft is None:
        return NgramDraft(device=target.device)
    if isinstance(draft, TargetItself):
        reader = Runner(draft.model.model, "draft", vocab_size, draft.model.stack) if draft.model else None
        return SelfDraft(target, vocab_size, reader=reader)
    if isinstance(draft, LoadedHead):
        packed = draft.precision in QUANTISED or target.native  # whose steps would else take longer than the target's tokens
        return FeatureDraft(draft.head, target.model, vocab_size, packed)
    if not same_tokenizer(tokenizer, draft.tokenizer):
        return make_text_draft(draft, tokenizer, vocab_size)
    return ModelDraft(Runner(draft.model, "draft", vocab_size, draft.stack), vocab_size)
