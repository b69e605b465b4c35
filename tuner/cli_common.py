"""What the commands share: JSON out, sampling options, interrupts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from lossyspec.errors import nearest

INTERRUPTED = 130


class Group(click.Group):
    """Unknown commands get the nearest right spelling."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click's, with a suggestion."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(f"{error.message}{nearest(args[0], self.commands)}", ctx) from None


def print_json(data: Any) -> None:
    """The result of a command, on stdout."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


class Interrupts:
    """The first Ctrl-C ends the current trial or block and saves, the second stops at once, the third aborts."""

    def __init__(self) -> None:
        self.count = 0
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self.count += 1
        if self.count == 1:
            click.echo("\nending the current step; Ctrl-C again stops at once", err=True)
        elif self.count == 2:
            raise KeyboardInterrupt
        else:
            os._exit(INTERRUPTED)

    def __call__(self) -> bool:
        """Whether the search should end."""
        return self.count > 0


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--temperature and its companions; None: the task's or the profile's own."""
    for option in (
        click.option("--repetition-penalty", type=float, default=None, help="1 is off. [default: off]"),
        click.option("--top-p", type=float, default=None, help="Nucleus sampling. [default: off]"),
        click.option("--top-k", type=int, default=None, help="Only the k likeliest tokens. [default: off]"),
        click.option("--temperature", type=float, default=None, help="0 is greedy. [default: the task's or profile's own]"),
    ):
        command = option(command)
    return command


def given(**values: Any) -> dict[str, Any]:
    """The options that were given; 0 and empty count as given."""
    return {name: value for name, value in values.items() if value is not None}


def show_run(folder: Path) -> None:
    """The front of a run as a table."""
    run = import_module("lossyspec.reports.load").load_run(folder)
    console = Console()
    console.print(import_module("lossyspec.reports.tables").front_table(run, console.width))
