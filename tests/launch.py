"""Start real ranks for a test, and say where each stood if they hang."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from distctx.launchers import known_variables

HERE = Path(__file__).parent

#: What a launcher may have set around the test run, and must not reach a test's own ranks.
LAUNCH_VARIABLES = known_variables()

#: What gloo of torch 2.8 and 2.9 writes at every start, in pieces between which others may write.
_GLOO_PIECES = (
    r"\[Gloo\] Rank ", r"\d+", r" is connected to ", r"\d+", r" peer ranks\. ",
    r"Expected number of connected peer ranks is : ", r"\d+", r"\n?",
)  # fmt: skip
_GLOO_LINE = re.compile("".join(_GLOO_PIECES))
_GLOO_LINES = re.compile(rf"{_GLOO_PIECES[0]}(?:{'|'.join(_GLOO_PIECES[:-1])}|\n)*")


def without_gloo(text: str) -> str:
    """What ranks wrote, without what gloo wrote between."""
    return _GLOO_LINES.sub("", _GLOO_LINE.sub("", text))


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without any launch, the package importable, one thread a rank."""
    environ = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return (
        environ
        | {"PYTHONPATH": path.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}
        | dict(extra or {})
    )


def lacks(what: str) -> NoReturn:
    """Skip for want of something; where all must be there, fail."""
    say = pytest.fail if "DISTCTX_TEST_ALL" in os.environ else pytest.skip
    say(f"needs {what}")


def need(module: str) -> None:
    """Skip without one of the extra ``dev``; where all of it must be there, fail."""
    if importlib.util.find_spec(module) is None:
        lacks(f"{module}, of the extra dev")


def run(
    *command: str,
    timeout: float = 60,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python COMMAND…`` to its end, in a clean environment."""
    done = subprocess.run(
        [sys.executable, *command],
        env=clean_environment(environ),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    done.stdout, done.stderr = map(without_gloo, (done.stdout, done.stderr))
    return done


def torchrun(*command: str, nproc: int) -> list[str]:
    """The command that starts ``nproc`` ranks of ``python COMMAND…`` on this machine."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *command]


def run_bodies(
    module: str, bodies: Sequence[str], nproc: int, out: Path, timeout: float = 90
) -> dict[str, list[Any]]:
    """What each body returned on each rank of a torchrun job, by body, in the order of ranks.

    Ranks that hang are asked for their stacks, ended, and shown; see ``value_of`` for those that
    raise.
    """
    command = torchrun(str(HERE / "rank_main.py"), str(out), module, *bodies, nproc=nproc)
    process = subprocess.Popen(
        [sys.executable, *command],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stacks = _stacks(out)
        # torchrun's workers are in sessions of their own.
        workers = [int(path.read_text()) for path in _by_rank(out, "pid")]
        for pid in (process.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{nproc} ranks hung for {timeout:g} s; they stood here:\n{stacks}\n{output}")
    results = [json.loads(path.read_text()) for path in _by_rank(out, "json")]
    if len(results) != nproc or process.returncode:
        pytest.fail(f"{len(results)} of {nproc} ranks came to the end:\n{output}")
    by_body: dict[str, list[Any]] = {}
    for body in bodies:
        errors = [
            f"rank {rank}:\n{one[body]['error']}"
            for rank, one in enumerate(results)
            if "error" in one[body]
        ]
        values = [one[body].get("value") for one in results]
        by_body[body] = [RuntimeError("\n".join(errors))] if errors else values
    return by_body


def value_of(results: dict[str, list[Any]], body: str) -> list[Any]:
    """What ``body`` returned on each rank; fails the test where a rank raised."""
    values = results[body]
    if isinstance(values[0], RuntimeError):
        pytest.fail(str(values[0]))
    return values


def _by_rank(out: Path, ending: str) -> list[Path]:
    return sorted(out.glob(f"*.{ending}"), key=lambda path: int(path.stem))


def _stacks(out: Path) -> str:
    for path in _by_rank(out, "pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGUSR1)
    time.sleep(0.5)
    return "\n".join(f"rank {path.stem}:\n{path.read_text()}" for path in _by_rank(out, "stack"))
