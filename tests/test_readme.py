"""README.rst is true: its programs and its commands run, and print what it says.

A comment ``.. test: HOW`` stands before each block that is run: ``python``, ``torchrun N``,
``pytest OUTCOME``, ``shell``, ``env`` or ``check``; ``output`` is what the block before it prints,
``report`` what it says of a failure. The two set-up lines are run by .ci/run.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from launch import HERE, run, torchrun

README = (HERE.parent / "README.rst").read_text()
BLOCK = re.compile(
    r"(?:^\.\. test: (?P<how>.+)\n\n)?"
    r"^\.\. code-block:: (?P<kind>\w+)\n\n"
    r"(?P<text>(?:    .*\n|\n)+)",
    re.MULTILINE,
)


class Block(NamedTuple):
    """A block of README.rst, and how it is run."""

    how: str
    kind: str
    text: str
    line: int


BLOCKS = [
    Block(
        found["how"] or "",
        found["kind"],
        textwrap.dedent(found["text"]).strip() + "\n",
        README[: found.start()].count("\n") + 1,
    )
    for found in BLOCK.finditer(README)
]
#: The sessions, which test_terminals.py goes through.
SESSIONS = ("stop", "attach", "hang", "stacks")
PROGRAMS = [i for i, b in enumerate(BLOCKS) if b.kind == "python" and b.how not in SESSIONS]


def tidy(text: str) -> str:
    """A report without what differs from run to run: host, pid, times, torch's version."""
    text = re.sub(r"torch \S+", "torch T", text)
    text = re.sub(r"^(\d+) +\S+ +\d+ +cpu", r"\1 HOST PID cpu", text, flags=re.MULTILINE)
    text = re.sub(r"^rank +host +pid +device", "rank HOST PID device", text, flags=re.MULTILINE)
    text = re.sub(r" *[\d.]+ ms", " MS", text)
    return re.sub(r"[\d.]+ s$", "S", text, flags=re.MULTILINE)


def command_of(block: Block) -> tuple[list[str], str]:
    """The arguments of the one ``$ python …`` line of a console block, and what it shows below."""
    line, _, shown = block.text.partition("\n")
    words = line.removeprefix("$ ").split()
    assert words.pop(0) == "python"
    return words, shown


@pytest.mark.parametrize("index", PROGRAMS, ids=lambda i: f"line {BLOCKS[i].line}")
def test_programs(index: int, tmp_path: Path) -> None:
    """Every Python block runs as it says, and prints the output that README.rst shows."""
    block = BLOCKS[index]
    how, _, nproc = block.how.partition(" ")
    if how == "pytest":
        check_suite(block, BLOCKS[index + 1], nproc, tmp_path)
        return
    assert how in ("python", "torchrun"), "a Python block without a way to run it"
    program = tmp_path / "program.py"
    program.write_text(block.text)
    command = torchrun(str(program), nproc=int(nproc)) if how == "torchrun" else [str(program)]
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = [b for b in BLOCKS[index + 1 : index + 3] if b.how == "output"]
    following = [b.kind for b in BLOCKS[index + 1 : index + 3]]
    if outputs and "python" not in following[: following.index("text")]:
        left = done.stdout
        for line in outputs[0].text.splitlines():
            assert line in left
            left = left.replace(line, "", 1)
        left = re.sub(r"\[Gloo\].*", "", left)  # of torch 2.8 and 2.9
        assert not left.strip()  # ranks print at once, so line ends may stand anywhere


def check_suite(suite: Block, shown: Block, outcome: str, folder: Path) -> None:
    """A suite ends as README.rst says, and says what it shows, in that order."""
    (folder / "test_program.py").write_text(suite.text)
    done = run("-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", cwd=folder)
    assert f"= {outcome} in " in done.stdout, done.stdout
    assert shown.how == "report"
    left = re.sub(r"\d\.\d\d( to \d\.\d\d)? s *", "TIME ", done.stdout)
    for line in re.sub(r"\d\.\d\d( to \d\.\d\d)? s *", "TIME ", shown.text).splitlines():
        _, found, left = left.partition(line.strip())
        assert found, f"{line}\n{done.stdout}"


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.how in ("shell", "check")], ids=lambda b: f"line {b.line}"
)
def test_commands(block: Block, tmp_path: Path) -> None:
    """Every command that can be run exits with 0 and prints what README.rst shows."""
    words, shown = command_of(block)
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tidy(done.stdout).strip() == tidy(shown).strip()


def test_env(tmp_path: Path) -> None:
    """``env`` under a launcher prints what README.rst shows."""
    (block,) = [b for b in BLOCKS if b.how == "env"]
    words, shown = command_of(block)
    set_ = dict(line.strip().split("=") for line in shown.split("Set are:\n")[1].splitlines())
    done = run(*words, cwd=tmp_path, environ=set_)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == shown.strip()


def test_every_block_is_run_or_is_a_known_line() -> None:
    """No block is left out: what is not run here is the launch line, or the two of .ci/run."""
    left = [b.text for b in BLOCKS if not b.how]
    ci = (HERE.parent / ".ci" / "run").read_text()
    assert left.pop(0) == "$ torchrun --nproc-per-node 4 where.py\n"
    settings = [text for text in left if text.startswith("[run]")]  # test_pytest_others.py has it
    left = [text for text in left if text not in settings]
    assert len(left) == 2
    assert len(settings) == 1
    for text in left:
        for command in text.removeprefix("$ ").strip().split(" && "):
            assert command in ci
