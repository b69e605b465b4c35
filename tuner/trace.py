"""The trace: one pass of the models along the task's texts, kept small enough to replay thousands of configurations on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lossyspec.acceptance import entropy
from lossyspec.drafting import CompactDraft
from lossyspec.errors import ConfigurationError
from lossyspec.likelihood import Flags, Floats
from lossyspec.ngram_drafting import ngram_chain
from lossyspec.policy import Boundaries
from lossyspec.runner import Runner
from lossyspec.sampling import probabilities
from lossyspec.settings import BOUNDARIES, Attention, NgramSettings, Precision, Sampling, format_of

from .laws import BinnedLaw, GreedyLaw, Law, OneHotLaw, bin_masses

#: draft temperatures that a trace of a sampling draft holds
TAUS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)
#: and of a feature head, which has a law at each depth
HEAD_TAUS = (0.7, 1.0, 1.2)
#: logits of this many positions are held at a time
_CHUNK = 128


@dataclass(frozen=True)
class Texts:
    """Prompts and outputs as token ids. limited: the output was cut at the token limit, not ended by the model."""

    prompts: list[list[int]]
    outputs: list[list[int]]
    limited: list[bool]

    @property
    def tokens(self) -> int:
        """Output tokens of all texts."""
        return sum(map(len, self.outputs))


@dataclass
class Trace:
    """One half of a workload. plain: log p of each output token by the target's format (a precision, or a precision with
    sparse attention: `Settings.target_format`), flat over texts.

    reference: the precision whose p the perplexity ratio is taken against.
    entropy: of p in nats, by format. kinds: (T,) what each position is, a bit for each of BOUNDARIES; None: not known.
    chain: (T, max_draft_length) running least confidence of what prompt lookup would propose from the position on; -1:
    nothing. drafted: (T,) its token at each position, -1: nothing. lookup: its laws by format.
    laws: of the loaded draft, by (`Settings.draft_format`, tau) and then by depth of a round; one where the depth makes no
    difference. Empty where prompt lookup is the only draft. How a draft goes on from a position is not known without
    running it: see `forced_chain`.
    """

    texts: Texts
    reference: Precision
    chain: Floats
    drafted: Tensor
    lookup: dict[str, Law] = field(default_factory=dict)
    laws: dict[tuple[str, float], tuple[Law, ...]] = field(default_factory=dict)
    plain: dict[str, Floats] = field(default_factory=dict)
    entropy: dict[str, Floats] = field(default_factory=dict)
    kinds: Tensor | None = None

    def mask(self) -> Flags:
        """(N, L) which places of the padded texts hold a token."""
        longest = max(map(len, self.texts.outputs))
        return np.array([[place < len(output) for place in range(longest)] for output in self.texts.outputs])

    def last_of_limited(self) -> Flags:
        """(N, L) the last token before the limit: never drafted, since a round leaves room for the token after it."""
        mask = np.zeros_like(self.mask())
        for row, (output, limited) in enumerate(zip(self.texts.outputs, self.texts.limited, strict=True)):
            if limited:
                mask[row, len(output) - 1] = True
        return mask


def ngram_chains(texts: Texts, settings: NgramSettings, limit: int) -> tuple[Tensor, Floats]:
    """(T,) drafted token at each position (-1: none), and (T, limit) its chain of confidences."""
    first: list[int] = []
    chain = np.full((texts.tokens, limit), -1.0)
    for prompt, output in zip(texts.prompts, texts.outputs, strict=True):
        for place in range(len(output)):
            drafted = ngram_chain(prompt + output[:place], settings, limit)
            confidences = [confidence for _, confidence in drafted]
            chain[len(first), : len(confidences)] = np.minimum.accumulate(confidences) if confidences else []
            first.append(drafted[0][0] if drafted else -1)
    return torch.tensor(first), chain


def forced_chain(confidences: Sequence[Floats], texts: Texts, limit: int) -> Floats:
    """The chain of a draft model, taken along the text itself: its own continuation is not known without running it.
    confidences: (T,) at each depth of a round; beyond the last, that one holds. A draft does not know that the text ends,
    so past its end the chain stays at its last value."""
    chain = np.full((len(confidences[0]), limit), np.inf)
    first = 0
    for output in texts.outputs:
        for depth in range(min(limit, len(output))):
            part = confidences[min(depth, len(confidences) - 1)][first : first + len(output)]
            chain[first : first + len(part) - depth, depth] = part[depth:]
        first += len(output)
    return np.minimum.accumulate(chain, axis=1)


def position_kinds(texts: Texts, boundaries: Boundaries | None) -> Tensor | None:
    """(T,) bits of what each position is, in the order of BOUNDARIES."""
    if boundaries is None:
        return None
    found = [boundaries.after(output[:place]) for output in texts.outputs for place in range(len(output))]
    return torch.tensor([sum(1 << BOUNDARIES.index(kind) for kind in kinds) for kinds in found], dtype=torch.uint8)


@torch.inference_mode()
def text_logits(runner: Runner, prompt: list[int], output: list[int]) -> list[Tensor]:
    """fp32 logits (n, V) that predict each output token, in pieces, by the same cached passes as decoding."""
    return text_pass(runner, prompt, output)[0]


@torch.inference_mode()
def text_pass(
    runner: Runner, prompt: list[int], output: list[int], attention: Attention | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """`text_logits`, and the features (1, n, hidden) of all tokens read, where the runner keeps them.

    attention: sparse for the output, as in decoding, which reads the prompt densely."""
    runner.check_room(len(prompt) + len(output))
    runner.start([prompt], len(prompt) + len(output))
    read = [prompt[-1], *output[:-1]]
    pieces, features = [], [runner.features]
    for begin in range(0, len(read), _CHUNK):
        piece = torch.tensor([read[begin : begin + _CHUNK]], device=runner.device)
        pieces.append(runner.logits(piece, [len(prompt) - 1 + begin], attention)[0])
        features.append(runner.features)
    known = [part for part in features if part is not None]
    return pieces, torch.cat(known, 1) if known else None


def _joined(kind: type[Any], pieces: list[dict[str, Tensor]]) -> Law:
    law: Law = kind(**{name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]})
    return law


def _one_hot(p: Tensor, text: Tensor, drafted: Tensor, greedy: bool, confidence: Tensor) -> dict[str, Tensor]:
    some = drafted >= 0
    chosen = torch.where(some, p.gather(-1, drafted.clamp_min(0).unsqueeze(-1)).squeeze(-1), 0.0).double()
    if greedy:
        best, index = p.max(-1)
        return {"p_draft": chosen, "p_best": best.double(), "hit": drafted == index, "confidence": confidence}
    return {
        "p_draft": chosen,
        "p_text": p.gather(-1, text.unsqueeze(-1)).squeeze(-1).double(),
        "entropy": entropy(p).double(),
        "hit": drafted == text,
        "confidence": confidence,
    }


def _binned(p: Tensor, q: Tensor, text: Tensor) -> dict[str, Tensor]:
    p_mass, q_mass = bin_masses(p, q)
    pick = text.unsqueeze(-1)
    return {
        "p_mass": p_mass,
        "q_mass": q_mass,
        "p_text": p.gather(-1, pick).squeeze(-1).double(),
        "q_text": q.gather(-1, pick).squeeze(-1).double(),
        "confidence": q.amax(-1).double(),
    }


class Tracer:
    """Adds the laws of one precision to a trace.

    full_support: the request's temperature without top-k, top-p or penalties, as the perplexity ratio needs it.
    """

    def __init__(
        self,
        sampling: Sampling,
        max_draft_length: int,
        ngram: NgramSettings | None = None,
        boundaries: Boundaries | None = None,
    ) -> None:
        self.boundaries = boundaries
        self.full_support = Sampling(temperature=sampling.temperature)
        self.greedy = sampling.temperature == 0
        self.ngram = ngram or NgramSettings()
        self.limit = max_draft_length

    def begin(self, texts: Texts, reference: Precision) -> Trace:
        """An empty trace of texts; raises ConfigurationError when a text has no token."""
        if not all(texts.outputs):
            raise ConfigurationError("a text of the workload has no tokens to trace")
        drafted, chain = ngram_chains(texts, self.ngram, self.limit)
        return Trace(texts, reference, chain, drafted, kinds=position_kinds(texts, self.boundaries))

    def add(
        self,
        trace: Trace,
        precision: str,
        target: Runner,
        draft: Runner | CompactDraft | None,
        progress: Callable[[], None] = lambda: None,
        taus: Sequence[float] = TAUS,
        attention: Attention | None = None,
    ) -> None:
        """Runs target (and draft, at `taus`) along the texts. Calls `progress` after each text. attention: sparse on the
        target's side; on the draft's, what the draft already sees, by name."""
        sparse = attention or Attention()
        form, drafting = format_of(precision, sparse.on("verify")), format_of(precision, sparse)
        least = getattr(draft, "least_prefix", 0)
        parts: dict[tuple[float, int], list[dict[str, Tensor]]] = {}
        looked_up: list[dict[str, Tensor]] = []
        support = draft.support if isinstance(draft, CompactDraft) else None
        plain: list[Tensor] = []
        entropies: list[Tensor] = []
        first = 0
        for prompt, output in zip(trace.texts.prompts, trace.texts.outputs, strict=True):
            pieces, features = text_pass(target, prompt, output, sparse.on("verify"))
            drafts = self._draft_logits(draft, prompt, output, features)
            for index, logits in enumerate(pieces):
                text = torch.tensor(output[index * _CHUNK : index * _CHUNK + logits.shape[0]])
                p = probabilities(logits, self.full_support).cpu()
                plain.append(p.gather(-1, text.unsqueeze(-1)).squeeze(-1).double().log())
                entropies.append(entropy(p).double())
                looked_up.append(self._looked_up(trace, p, text, first))
                for depth, q_pieces in enumerate(drafts):
                    begun = torch.arange(len(text)) + len(prompt) + index * _CHUNK - depth  # tokens before the round
                    for tau, part in self._drawn(p, q_pieces[index], text, support, taus):
                        part["confidence"] = torch.where(begun < least, -1.0, part["confidence"])
                        parts.setdefault((tau, depth), []).append(part)
                first += logits.shape[0]
            progress()
        trace.plain[form] = torch.cat(plain).numpy()
        trace.entropy[form] = torch.cat(entropies).numpy()
        trace.lookup[form] = _joined(GreedyLaw if self.greedy else OneHotLaw, looked_up)
        laws: dict[float, list[Law]] = {}
        for (tau, _), kept in sorted(parts.items()):
            laws.setdefault(tau, []).append(_joined(GreedyLaw if self.greedy else BinnedLaw, kept))
        trace.laws.update({(drafting, tau): tuple(by_depth) for tau, by_depth in laws.items()})

    def _draft_logits(
        self, draft: Runner | CompactDraft | None, prompt: list[int], output: list[int], features: Tensor | None
    ) -> list[list[Tensor]]:
        """Logits of the draft by depth, in the pieces of `text_pass`; over its support if it has one."""
        if draft is None:
            return []
        if isinstance(draft, Runner):
            return [text_logits(draft, prompt, output)]
        return [list(law.split(_CHUNK)) for law in draft.along(prompt, output, features, self.limit)]

    def _looked_up(self, trace: Trace, p: Tensor, text: Tensor, first: int) -> dict[str, Tensor]:
        """The law of prompt lookup."""
        place = slice(first, first + len(text))
        confidence = torch.from_numpy(trace.chain[place, 0].copy())
        return _one_hot(p, text, trace.drafted[place], self.greedy, confidence)

    def _drawn(
        self, p: Tensor, q_logits: Tensor, text: Tensor, support: Tensor | None, taus: Sequence[float]
    ) -> list[tuple[float, dict[str, Tensor]]]:
        """The laws of a draft that samples, one for each tau."""
        if self.greedy:
            q = probabilities(q_logits, self.full_support).cpu()
            best = q[:, : p.shape[-1]].argmax(-1) if support is None else support.cpu()[q.argmax(-1)]
            return [(1.0, _one_hot(p, text, best, True, q.amax(-1).double()))]
        if support is not None:  # all tokens that the draft cannot propose are one, on which q is 0
            keep = support.cpu()
            inside, chosen = p[:, keep], p.gather(-1, text.unsqueeze(-1)).squeeze(-1).double()
            p = torch.cat([inside, (p.sum(-1) - inside.sum(-1)).clamp_min(0).unsqueeze(-1)], -1)
            place = torch.searchsorted(keep, text).clamp_max(len(keep) - 1)
            text = torch.where(keep[place] == text, place, len(keep))
            q_logits = torch.nn.functional.pad(q_logits, (0, 1), value=-torch.inf)
        laws = [(tau, _binned(p, probabilities(q_logits, self.full_support, tau).cpu(), text)) for tau in taus]
        return [(tau, law if support is None else {**law, "p_text": chosen}) for tau, law in laws]


def reference_texts(prompts: Sequence[list[int]], references: Sequence[list[int]], limit: int) -> Texts:
    """Texts of the task's human references, cut at `limit` tokens."""
    return Texts(
        list(map(list, prompts)), [list(ids[:limit]) for ids in references], [len(ids) >= limit for ids in references]
    )
