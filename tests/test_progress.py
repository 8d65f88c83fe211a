"""What a long wait says of itself, in the log and on a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

from launch import clean_environment, run

ALONE = """
import logging, sys
from distctx import DistributedRuntime, RendezvousTimeoutError, progress

logging.basicConfig(format="LOG %(message)s")
progress._REPORT_AFTER, progress._REDRAW = 0.3, 0.1
try:
    DistributedRuntime("gloo", "file://" + sys.argv[1], 0, 8, rendezvous_timeout=2).open()
except RendezvousTimeoutError as error:
    print("ENDED", error.missing_ranks, file=sys.stderr)
"""


def written_to_a_terminal(place: Path, columns: int) -> str:
    """What rank 0 of 8, whom nobody joins, writes to its stderr, a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-c", ALONE, str(place)]
    process = subprocess.Popen(
        command, env=clean_environment(), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    text = b""
    with suppress(OSError):  # EIO: the last of the other end has gone
        while part := os.read(ours, 4096):
            text += part
    os.close(ours)
    assert process.wait(30) == 0
    return text.decode()


def on_screen(text: str) -> list[str]:
    """The lines that a terminal shows after ``text``: a carriage return writes over what stands."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_a_live_line_on_a_terminal(tmp_path):
    """Where stderr is a terminal a wait is a line that is redrawn with the time, and then gone."""
    text = written_to_a_terminal(tmp_path / "store", 120)
    line = r"waiting for 7 of 8 ranks: 1, 2, 3, 4, 5, 6, 7 \(\d s of 2 s\) to start the world"
    drawn = re.findall(r"\r" + line, text)
    assert len(drawn) >= 5
    assert len(set(drawn)) >= 2
    shown = on_screen(text)
    assert shown[-2] == "ENDED (1, 2, 3, 4, 5, 6, 7)"
    assert all(re.fullmatch("LOG " + line, shown_line) for shown_line in shown[:-2])


def test_a_live_line_fits(tmp_path):
    """A narrow terminal gets as much of the line as fits on one of its own."""
    text = written_to_a_terminal(tmp_path / "store", 30)
    drawn = [part for part in re.split(r"[\r\n]", text) if part.startswith("waiting")]
    assert drawn
    assert max(map(len, drawn)) == 29


def test_no_live_line_elsewhere(tmp_path):
    """Where stderr is a file the wait is in the log alone, each time after twice as long."""
    done = run("-c", ALONE, str(tmp_path / "store"))
    assert done.returncode == 0
    assert "\r" not in done.stderr
    logged = [
        line for line in done.stderr.splitlines() if line.startswith("LOG waiting for 7 of 8")
    ]
    assert 2 <= len(logged) <= 3
