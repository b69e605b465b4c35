"""Prompts as users write them, into token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from .errors import ConfigurationError

#: plain text (one user message, where the tokenizer has a chat template), or chat messages
Prompt = str | Sequence[dict[str, str]]


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. Messages go through the chat template; a string too, as one user message, when the
    tokenizer has a template, else it is taken as plain text."""
    check_prompt(prompt)
    if isinstance(prompt, str) and getattr(tokenizer, "chat_template", None) is None:
        ids = tokenizer(prompt)["input_ids"]
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigurationError("the tokenizer has no chat template: give prompts as plain strings")
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
                "input_ids"
            ]
        except (TemplateError, ValueError, TypeError) as problem:  # a role or an order of turns that it does not know
            raise ConfigurationError(f"the chat template refuses the messages: {problem}") from problem
    if not ids:
        raise ConfigurationError(f"prompt {prompt!r} has no tokens; it must have at least one")
    return list(ids)


def check_prompt(prompt: Any) -> None:
    """Raises ConfigurationError for what is neither a string nor messages, naming what it is."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise ConfigurationError(
            f"prompt is {prompt!r}; allowed: a string, or a list of messages {{'role': text, 'content': text}}"
        )
    if not prompt:
        raise ConfigurationError("prompt is an empty list of messages; it must have at least one")
    for message in prompt:
        parts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise ConfigurationError(f"message is {message!r}; allowed: {{'role': text, 'content': text}}")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or messages) as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
        raise ConfigurationError(f"prompts is {prompts!r}; allowed: a string, messages, or a list of these")
    many: list[Any] = list(prompts)
    return [many] if many and isinstance(many[0], dict) else many
