"""HumanEval-style problems: from a model's answer to a program that fails unless the answer is right."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FENCE = re.compile(r"```[a-zA-Z0-9_+-]*[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """prompt: the head of a function. test: source that defines check(candidate). entry_point: the function's name."""

    prompt: str
    test: str
    entry_point: str

    @property
    def question(self) -> str:
        """The problem as a user would put it to a chat model."""
        return (
            f"Complete this Python function. Answer with the whole function in one code block.\n\n"
            f"```python\n{self.prompt.strip()}\n```"
        )

    def program(self, answer: str) -> str:
        """The program to run: the answer's code after the prompt's own imports and helpers, then the tests."""
        code, name = self._code(answer), re.escape(self.entry_point)
        defines = re.compile(rf"^def {name}\b", re.MULTILINE)
        if defines.search(code):
            head = defines.split(self.prompt, maxsplit=1)[0]  # imports and helpers before the function
            body = f"{head}\n{code}"
        else:
            body = self.prompt + _indented_part(code)
        return f"{body}\n\n{self.test}\n\ncheck({self.entry_point})\n"

    def _code(self, answer: str) -> str:
        """The fenced block that defines the function, else the first one, else the whole answer."""
        blocks = _FENCE.findall(answer)
        return next((block for block in blocks if f"def {self.entry_point}" in block), blocks[0] if blocks else answer)


def _indented_part(code: str) -> str:
    """A function's body up to the first line that is not part of it."""
    kept: list[str] = []
    for line in code.lstrip("\n").split("\n"):
        if line.strip() and not line[0].isspace():
            break
        kept.append(line)
    return "\n".join(kept) + "\n"
