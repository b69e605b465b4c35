"""The command line: options into a typed config, one call, one place where errors become messages and exit codes."""

from __future__ import annotations

import ctypes
import logging
import os
import sys

import click

from lossyspec.errors import EnvironmentProblem, LossyspecError

from .cli_common import INTERRUPTED, Group
from .cli_decode import detect, generate
from .cli_distill import distill
from .cli_files import profiles, show
from .cli_quality import quality
from .cli_report import report
from .cli_search import search

#: as a shell says it of a program that SIGPIPE ended
_BROKEN_PIPE = 141
#: glibc's mallopt (malloc.h): what is freed goes back to the system beyond so much, what is larger has pages of its own
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _OWN_PAGES_BYTES = 1 << 30, 1 << 25


@click.group(cls=Group, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lossytune")
def app() -> None:
    """Tunes lossy speculative decoding for this device, a model pair and a task, and says what it costs in quality.

    Exit codes: 0 ok, 1 bug, 2 usage or configuration, 3 no feasible point, 4 environment, 5 every trial failed,
    6 profile mismatch, 130 interrupted.
    """


for command in (search, distill, detect, generate, quality, show, report, profiles):
    app.add_command(command)


def _log_to_stderr() -> None:
    """What the library logs, as lines on stderr."""
    logger = logging.getLogger("lossytune")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _keep_memory() -> None:
    """Has the C library keep what torch frees for what it asks next: with new pages for each tensor of a long pass, the
    system takes a third of the pass to clear them. Nothing is done where the library has no such option."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def main() -> None:
    """Entry point: every error on purpose becomes one message and its exit code, without a traceback."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # torch's threads wait for each other by spinning; on a CPU that others use too, spinning for long stops all of them
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")
    _keep_memory()
    _log_to_stderr()
    try:
        app(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):  # click turns the second into the first
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except LossyspecError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read the output has gone, as `head` does; nothing is left to say it to
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.exit(_BROKEN_PIPE)
    except OSError as error:
        if error.errno is None:  # not the system's
            raise
        place = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {place}{error.strerror}; what was written before it is kept", err=True)
        sys.exit(EnvironmentProblem.exit_code)
