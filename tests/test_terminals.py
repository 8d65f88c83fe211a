"""Real terminals: pdb at a rank's own, ``attach`` at another, and the sessions in README.rst."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distctx.debug import ranks_here
from launch import clean_environment, need, torchrun
from test_readme import BLOCKS

#: The prompt of rank 1.
PROMPT = r"\(rank 1 of 4\) "


@pytest.fixture
def terminal() -> Iterator[Callable[..., Any]]:
    """Start ``python COMMAND…`` at a terminal of its own."""
    need("pexpect")
    import pexpect

    made = []

    def start(*command: str, cwd: Path, environ: dict[str, str]) -> Any:
        child = pexpect.spawn(
            sys.executable, list(command), cwd=str(cwd), env=environ | {"TERM": "dumb"},
            encoding="utf-8", timeout=30, dimensions=(40, 120),
        )  # fmt: skip
        made.append(child)
        return child

    yield start
    for child in made:
        child.close(force=True)


@contextlib.contextmanager
def running(program: str, name: str, folder: Path, nproc: int) -> Iterator[dict[str, str]]:
    """A torchrun job, as a person starts it; gives the environment of other terminals."""
    (folder / name).write_text(program)
    environ = clean_environment({"DISTCTX_DIR": str(folder / "n")})
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *torchrun(name, nproc=nproc)],
            cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield environ
        if name == "train.py":
            assert process.wait(30) == 0
    finally:
        for rank in ranks_here(folder / "n"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def wait_for(folder: Path, is_so: Callable[[list[Any]], bool]) -> None:
    """Until the ranks that left their names are so."""
    end = time.monotonic() + 60
    while not is_so(ranks_here(folder / "n")):
        assert time.monotonic() < end, (folder / "err").read_text()
        time.sleep(0.1)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="dx-") as folder:
        yield Path(folder)


def block(how: str) -> str:
    """The block of README.rst that is run like this."""
    (text,) = [one.text for one in BLOCKS if one.how == how]
    return text


def tidy(text: str) -> list[str]:
    """A session without what differs from run to run: pids, ports, folders, widths."""
    text = text.replace("\r", "")
    text = re.sub(r"(pid )?\b\d{3,}\b", "N", text)
    text = re.sub(r"\S*/(\w+\.py)", r"\1", text)
    text = re.sub(r" +", " ", text)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_the_session_in_the_readme(terminal, short):
    """Under torchrun a rank has no terminal: another one lists it, opens it, and lets it go, word
    for word as README.rst shows."""
    shown = block("attach")
    said = ""
    with running(block("stop"), "train.py", short, 4) as environ:
        wait_for(short, lambda ranks: any(rank.stopped and rank.socket.exists() for rank in ranks))
        child = None
        for line in shown.splitlines():
            if line.startswith("$ python "):
                said += line + "\n"
                words = line.removeprefix("$ python ").split()
                child = terminal(*words, cwd=short, environ=environ)
                if words[-1] == "attach":
                    said += child.read()
            elif found := re.match(PROMPT, line):
                child.expect(PROMPT)
                said += child.before + child.after
                child.sendline(line[found.end() :])
        said += child.read()
        err = (short / "err").read_text()
    assert tidy(said) == tidy(shown)
    assert (short / "out").read_text().count("6.0") == 4
    assert "is stopped at" in err
    assert re.search(r"python -m distctx attach \S+/n 1$", err, re.MULTILINE)


def test_stacks_in_the_readme(terminal, short):
    """A job that hangs in a collective under torchrun, seen from another terminal."""
    with running(block("hang"), "hang.py", short, 4) as environ:
        wait_for(short, lambda ranks: len(ranks) == 4)
        time.sleep(2)  # into the barrier
        child = terminal("-m", "distctx", "stacks", cwd=short, environ=environ)
        said = tidy(child.read())
    left = iter(said)
    for line in tidy(block("stacks"))[1:]:
        if line.strip() != "…":
            assert line in left, (line, said)


def test_attach_edits_lines_completes_and_interrupts(terminal, short):
    """TAB is answered by the rank, an arrow brings the last line back, Ctrl-C stops what the rank
    runs, Ctrl-D leaves it stopped."""
    with running(block("stop"), "train.py", short, 4) as environ:
        wait_for(short, lambda ranks: any(rank.stopped and rank.socket.exists() for rank in ranks))
        attach = ("-m", "distctx", "attach", "1")
        child = terminal(*attach, cwd=short, environ=environ)
        child.expect(PROMPT)
        child.send("rt.dp_par\t")
        child.expect("rt.dp_partition")
        child.sendline("")
        child.expect(r"Partition\(num_partitions=4, partition_index=1\)")
        child.expect(PROMPT)
        child.send("\x1b[A\r")
        child.expect("Partition.num_partitions=4")
        child.expect(PROMPT)
        child.sendline("import time; time.sleep(600)")
        time.sleep(0.5)
        child.sendintr()
        child.expect("KeyboardInterrupt")
        child.expect(PROMPT)
        child.send("half a li")
        child.expect("half a li")
        time.sleep(0.5)  # Python does not see a signal while readline takes a letter
        child.sendintr()  # at the prompt it drops the line
        child.expect(PROMPT)
        child.sendeof()
        child.expect("detached; rank 1 stays stopped")
        child.wait()
        child = terminal(*attach, cwd=short, environ=environ)
        child.expect(PROMPT)
        child.sendline("c")
        child.expect("rank 1 of 4 goes on")


OWN = """
from distctx import DistributedRuntime

def work(rt):
    mine = 41
    rt.breakpoint()
    mine += 1
    return mine

with DistributedRuntime() as rt:
    print("mine", work(rt))
"""


@pytest.mark.parametrize("ends", ["c", "q", "\x04"])
def test_its_own_terminal_is_plain_pdb(terminal, short, ends):
    """At a terminal, a world of 1 is in pdb as ever; quitting has no traceback."""
    (short / "own.py").write_text(OWN)
    environ = clean_environment({"DISTCTX_DIR": str(short / "n")})
    child = terminal("own.py", cwd=short, environ=environ)
    child.expect(r"own.py\(7\)work\(\)\r\n-> mine \+= 1\r\n\(Pdb\) ")
    child.sendline("p mine")
    child.expect("41")
    child.expect(r"\(Pdb\) ")
    child.sendline("n")
    child.expect(r"own.py\(8\)work\(\)")
    child.expect(r"\(Pdb\) ")
    child.send(ends if ends == "\x04" else f"{ends}\n")
    rest = child.read()
    child.close()
    assert child.exitstatus == 0
    assert "Traceback" not in rest
    assert ("mine 42" in rest) == (ends == "c")
    assert ("[distctx] told to quit at" in rest) == (ends != "c")
    assert list((short / "n").iterdir()) == []
