"""Runs a generated program in a process of its own, with limits. A limit, not a sandbox: see docs/quality.md."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.01
_FILE_BYTES = 1 << 20
#: sets its own limits (a function run between fork and exec is not safe beside torch's threads), then runs the program.
#: Only a program that came to its end is followed by the word of the day: an early exit(0) does not count as passed.
_BOOTSTRAP = """
import os, resource, runpy, sys
memory, seconds, size = map(int, sys.argv[1:4])
word = sys.stdin.readline()
said = os.dup(1)
nothing = os.open(os.devnull, os.O_RDWR)
os.dup2(nothing, 0)
os.dup2(nothing, 1)
for kind, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, size),
                    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (value, value))
runpy.run_path("program.py", run_name="__main__")
os.write(said, word.encode())
"""


@dataclass(frozen=True)
class Outcome:
    """passed: the program ran to its end. reason: why not, else None."""

    passed: bool
    reason: str | None = None


def _ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Waits for the end without reaping, so that the number of the process group stays ours until it is killed."""
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def run_program(source: str, timeout_s: float = 10.0, memory_bytes: int = 1 << 30) -> Outcome:
    """Runs Python source in a new process group, in an empty folder that is then removed, with a bare environment.

    timeout_s: wall clock, and CPU seconds rounded up. memory_bytes: address space. Its output is thrown away, and what it
    started is killed at the end, as far as it stayed in the group.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="lossytune-code-") as place:
        folder = Path(place)
        (folder / "program.py").write_text(source, encoding="utf-8", errors="replace")
        (folder / "bootstrap.py").write_text(_BOOTSTRAP, encoding="utf-8")
        limits = [str(memory_bytes), str(int(timeout_s) + 1), str(_FILE_BYTES)]
        with open(folder / "answer", "wb") as answer, open(folder / "errors", "wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", "bootstrap.py", *limits],
                cwd=folder, env={"PATH": os.defpath, "HOME": place}, stdin=subprocess.PIPE, stdout=answer, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
            try:
                assert process.stdin is not None
                process.stdin.write(f"{word}\n".encode())
                process.stdin.close()
                ended = _ended(process, time.monotonic() + timeout_s)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
        if not ended:
            return Outcome(False, f"ran for more than {timeout_s:g} s")
        if (folder / "answer").read_bytes().strip() == word.encode():
            return Outcome(True)
        lines = (folder / "errors").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return Outcome(False, lines[-1] if lines else f"ended early with code {code}")
