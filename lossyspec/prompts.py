"""Prompts as users write them, into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import ConfigurationError

#: plain text (one user message, where the tokenizer has a chat template), or chat messages
Prompt = str | Sequence[dict[str, str]]


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. Messages go through the chat template; a string too, as one user message, when the
    tokenizer has a template, else it is taken as plain text."""
    if isinstance(prompt, str) and getattr(tokenizer, "chat_template", None) is None:
        ids = tokenizer(prompt)["input_ids"]
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigurationError("the tokenizer has no chat template: give prompts as plain strings")
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
    if not ids:
        raise ConfigurationError(f"prompt {prompt!r} has no tokens; it must have at least one")
    return list(ids)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or messages) as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    many: list[Any] = list(prompts)
    return [many] if many and isinstance(many[0], dict) else many
