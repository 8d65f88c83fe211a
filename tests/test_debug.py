"""Stop and look: breakpoints, the terminal that attaches, the stacks of a job that hangs.

Real processes, each a rank; ``attach`` is fed from a pipe here, and at a real terminal in
``test_terminals.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from distctx import DistributedRuntime, LayoutError, MeshLayout, RuntimeStateError, debug
from distctx.breakpoints import selects
from distctx.debugger import Lines

STOPPED = """
total = torch.tensor([rt.rank + 10])
rt.breakpoint(rank=1)
dist.all_reduce(total)
print("sum", total.item(), flush=True)
"""


def test_the_others_wait_in_no_collective(job):
    """Parked for more than twice the group's timeout, then a correct all_reduce; the timeout is as
    it was."""
    ranks = job(4, STOPPED + 'print("timeout", _torch.group_timeout(rt.group()))', timeout=2)
    ranks.wait_stopped(1)
    time.sleep(4.5)
    said = ranks.attach("1", lines="p total\nc\n")
    assert "tensor([11])" in said.stdout
    assert "stopped at" not in said.stdout
    for rank in ranks.ended():
        assert rank.status == 0, rank.err
        assert rank.out == "sum 46\ntimeout 0:00:02\n"


def test_the_caller_is_where_it_stops(job):
    """pdb stands in the line after the call, in the caller's frame; n and p work there."""
    ranks = job(2, "mine = 7\nrt.breakpoint()\nmine += 1\nprint('mine', mine, flush=True)\n")
    ranks.wait_stopped(0)
    listed = ranks.attach().stdout
    line = ranks.line_of("mine += 1")
    assert re.search(rf"^0/2 at \(dp=0, tp=0\) +\d+ +\S*body.py:{line} in <module> ", listed, re.M)
    said = ranks.attach("0", lines="p mine\nn\nn\nmine = 50\nc\n").stdout
    assert f"body.py({line})<module>()\n-> mine += 1\n(rank 0 of 2) 7\n" in said
    assert "-> print('mine', mine, flush=True)" in said
    assert [rank.out.split()[-1] for rank in ranks.ended()] == ["8", "8"]


def test_leaving_keeps_it_stopped(job):
    """A terminal that goes, by the end of its input or by a kill, leaves the rank stopped; the next
    one sees where."""
    ranks = job(2, "kept = 'here'\nrt.breakpoint()\npass\n")
    ranks.wait_stopped(0)
    assert "[detached; rank 0 stays stopped]" in ranks.attach("0", lines="p kept\n").stdout
    with ranks.attached("0") as terminal:
        assert terminal.until("(rank 0 of 2) ")
        other = ranks.attach("0", lines="")
        assert "another terminal is attached to this rank" in other.stdout
        terminal.process.kill()
    said = ranks.attach("0", lines="p kept\nc\n").stdout
    assert "'here'" in said
    assert [rank.status for rank in ranks.ended()] == [0, 0]


def test_quitting_ends_every_rank(job):
    """``q`` ends all ranks with status 0 and one message, not with a traceback each."""
    ranks = job(4, "rt.breakpoint(rank=2)\nprint('never', flush=True)\n")
    ranks.wait_stopped(2)
    said = ranks.attach("2", lines="q\n").stdout
    assert said.rstrip().endswith("[rank 2 of 4 ends, with all 4 ranks]")
    ended = ranks.ended()
    assert [(rank.status, rank.out) for rank in ended] == [(0, "")] * 4
    messages = [line for rank in ended for line in rank.err.splitlines() if "attach" not in line]
    messages = [line for line in messages if "is stopped at" not in line]
    assert len(messages) == 1
    assert re.fullmatch(
        r"\[distctx\] told to quit at \S+:\d+: rank 2 of 4 ends, with all 4 ranks", messages[0]
    )


def test_quitting_ends_ranks_that_are_stopped_too(job):
    """``q`` on one of two stopped ranks ends both, and the one that waits."""
    ranks = job(3, "rt.breakpoint(rank=(1, 2))\n")
    ranks.wait_stopped(1, 2)
    ranks.attach("1", lines="q\n")
    ended = ranks.ended(within=15)
    assert [rank.status for rank in ended] == [0] * 3
    assert "".join(rank.err for rank in ended).count("told to quit") == 1


def test_quitting_after_release_ends_one(job):
    """Those that went on are not called back, and nobody says so."""
    ranks = job(2, "rt.breakpoint(rank=1)\nprint('on', flush=True)\ntime.sleep(2)\n")
    ranks.wait_stopped(1)
    ranks.attach("1", lines="release\n")
    assert ranks.says(0, "on")
    said = ranks.attach("1", lines="q\n").stdout  # it is stopped still
    assert "[rank 1 of 2 ends; the others had gone on]" in said


def test_what_is_said_reaches_every_terminal(job):
    """Output that no terminal can show, or longer than what is kept, is no end of looking."""
    ranks = job(1, "rt.breakpoint()\npass\n")
    ranks.wait_stopped(0)
    said = ranks.attach("0", lines="print('\\ud800', 'é')\n").stdout
    assert "\\ud800 é" in said
    said = ranks.attach("0", lines="print('BEGIN' + 'x' * 1_000_000 + 'END')\n").stdout
    assert said.count("x") > 1_000_000
    assert "BEGINx" in said
    assert "xEND" in said
    said = ranks.attach("0", lines="c\n").stdout
    assert "the beginning is left out" in said or "xEND" in said
    assert ranks.ended()[0].status == 0


def test_one_terminal_serves_stop_after_stop(job):
    """A breakpoint of pdb's own keeps the line open: the next stop comes to the same terminal."""
    ranks = job(1, "for i in range(3):\n    rt.breakpoint()\n    x = i\n    print(x, flush=True)\n")
    ranks.wait_stopped(0)
    line = ranks.line_of("print(x")
    said = ranks.attach("0", lines=f"b {line}\nc\nc\nc\np 'third', i\nclear 1\nc\n").stdout
    assert "('third', 1)" in said
    assert said.rstrip().endswith("[rank 0 of 1 goes on]")
    ranks.wait_stopped(0)
    ranks.attach("0", lines="c\n")
    assert ranks.ended()[0].out == "0\n1\n2\n"


def test_nobody_is_awaited_who_cannot_come(job):
    """A breakpoint of pdb's own that is met after the runtime was closed, where no terminal is
    attached any more, holds nothing; and nothing is left in the folder."""
    ranks = job(1, "rt.breakpoint()\npass\n", after="time.sleep(3)\nprint('after', flush=True)\n")
    ranks.wait_stopped(0)
    line = ranks.line_of("print('after'")
    with ranks.attached("0") as terminal:
        assert terminal.until("(rank 0 of 1) ")
        terminal.process.stdin.write(f"b {line}\nc\n")
        terminal.process.stdin.flush()
        assert terminal.until("Breakpoint 1")
        time.sleep(0.5)
        terminal.process.kill()
    (ended,) = ranks.ended(within=30)
    assert (ended.status, ended.out) == (0, "after\n")
    assert list(ranks.names.iterdir()) == []


def test_an_interrupted_wait_is_the_programs(job):
    """Ctrl-C while a rank that went on waits for another one is a KeyboardInterrupt of its own."""
    ranks = job(2, "rt.breakpoint(rank=(0, 1))\npass\n")
    ranks.wait_stopped(0, 1)
    ranks.attach("0", lines="c\n")
    time.sleep(1)
    ranks.processes[0].send_signal(signal.SIGINT)
    ranks.processes[0].wait(20)
    assert "KeyboardInterrupt" in ranks.output(0, "err")
    assert "OSError" not in ranks.output(0, "err")


def test_a_rank_that_cannot_listen_holds_nobody(job):
    """What fails in the rank that is to stop fails before it says that it stops."""
    body = (
        "if rt.rank == 1:\n    os.mkdir(debug.own_name(None, None, None).socket)\n"
        "rt.breakpoint(rank=1)\n"
    )
    ranks = job(2, "from distctx import debug\n" + body, timeout=3)
    waited, failed = ranks.ended(within=30)
    assert failed.status == 1
    assert waited.status == 1
    assert "waited in breakpoint() for rank 1 of 2" in waited.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_debugged_rank_that_dies_frees_the_others(job, number):
    """Those that wait get an error that names it, long before any timeout."""
    ranks = job(4, "rt.breakpoint(rank=3)\n", timeout=600)
    ranks.wait_stopped(3)
    ranks.processes[3].send_signal(number)
    *others, dead = ranks.ended(within=15)
    assert dead.status == -number
    for rank in others:
        assert rank.status == 1
        assert "RemoteRankError: Rank 3 (pid" in rank.err
        assert "ended while it was stopped at" in rank.err


def test_a_stopped_process_is_alive(job):
    """A debugged rank in the background (Ctrl-Z) is alive; the others go on waiting."""
    ranks = job(2, "rt.breakpoint(rank=1)\nprint('on', flush=True)\n", timeout=2)
    ranks.wait_stopped(1)
    ranks.processes[1].send_signal(signal.SIGSTOP)
    time.sleep(4)
    assert ranks.processes[0].poll() is None
    ranks.processes[1].send_signal(signal.SIGCONT)
    ranks.attach("1", lines="c\n")
    assert [rank.out for rank in ranks.ended()] == ["on\n"] * 2


def test_a_rank_that_does_not_come_is_named(job):
    """A breakpoint that not every rank reaches is an error after the group's timeout."""
    body = "if rt.rank != 1:\n    rt.breakpoint(when=False)\nelse:\n    time.sleep(60)\n"
    ranks = job(3, body, timeout=2)
    for rank in (0, 2):
        ranks.processes[rank].wait(30)
    ranks.processes[1].kill()
    for rank in ranks.ended()[::2]:
        assert "waited in breakpoint() for rank 1 of 3, which did not come within 2 s" in rank.err


def test_several_stop_and_each_goes_on_alone(job):
    """Two ranks that stop are two to let go; ``when`` is each rank's own."""
    body = "rt.breakpoint(when=rt.rank in (1, 2))\nprint('on', time.time(), flush=True)\n"
    ranks = job(4, body)
    ranks.wait_stopped(1, 2)
    assert "[rank 1 of 4 goes on]" in ranks.attach("1", lines="c\n").stdout
    time.sleep(1)
    assert all(process.poll() is None for process in ranks.processes)
    let_go = time.time()
    ranks.attach("2", lines="c\n")
    ended = ranks.ended()
    assert [rank.status for rank in ended] == [0] * 4
    assert all(float(rank.out.split()[1]) > let_go for rank in ended)


def test_release_lets_the_others_go_on(job):
    """``release`` frees the others, so that this rank can be stepped over a collective."""
    ranks = job(2, STOPPED)
    ranks.wait_stopped(1)
    said = ranks.attach("1", lines="release\nn\np total\nc\n").stdout
    assert "The other ranks go on." in said
    assert "tensor([21])" in said
    assert [rank.out for rank in ranks.ended()] == ["sum 21\n"] * 2


def test_what_needs_the_others_is_refused(job):
    """The first touch of the mesh, by TAB too, is an error at a breakpoint, where all others wait;
    afterwards it is built."""
    ranks = job(2, "rt.breakpoint(rank=1)\nprint(rt.mesh.size(), flush=True)\n")
    ranks.wait_stopped(1)
    said = ranks.attach("1", lines="p rt.mesh\nc\n").stdout
    assert "*** distctx.exceptions.RuntimeStateError: The other ranks wait at a breakpoint" in said
    assert [rank.out for rank in ranks.ended()] == ["2\n"] * 2


def test_stepping_off_the_end_frees_the_others(job):
    """A rank that is stepped out of its block keeps nobody."""
    ranks = job(2, "rt.breakpoint(rank=1)\npass\n")
    ranks.wait_stopped(1)
    ranks.attach("1", lines="n\nn\nn\nn\nc\n")
    assert [rank.status for rank in ranks.ended()] == [0, 0]


def test_a_breakpoint_of_pdbs_own_is_found_again(job):
    """Breakpoints that the person set stop this rank again after ``c``, and it can be attached
    to again."""
    ranks = job(2, STOPPED)
    ranks.wait_stopped(1)
    line = ranks.line_of('print("sum"')
    ranks.attach("1", lines=f"b {line}\nc\n")
    ranks.wait_stopped(1, line=line)
    assert "tensor([21])" in ranks.attach("1", lines="p total\nclear 1\nc\n").stdout
    assert [rank.out for rank in ranks.ended()] == ["sum 21\n"] * 2


def test_where_everybody_stands(job):
    """``stacks`` groups the ranks of a hung job by their last line outside torch, while they are
    stuck in a collective, without a thread in them; one that is stopped by the system is told."""
    body = """
def load():
    time.sleep(600)

time.sleep(1)  # for the thread that told of the start
print("threads", [thread.name for thread in threading.enumerate()], flush=True)
if rt.rank == 3:
    load()
if rt.rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1))
"""
    ranks = job(4, body, timeout=600)
    reduces, sleeps = ranks.line_of("dist.all_reduce"), ranks.line_of("time.sleep(600)")
    assert all(ranks.says(rank, "threads ['MainThread']") for rank in range(4))
    time.sleep(1)
    for _ in range(2):  # asking changes nothing
        said = ranks.run("stacks")
        lines = said.stdout.splitlines()
        assert re.fullmatch(r"\S*body.py, job .*: 4 of 4 ranks here", lines[0])
        assert lines[1:4] == [
            f"ranks 0-1: {ranks.script}:{reduces} all_reduce",
            "rank 2: does not answer; its state is T (stopped)",
            f"rank 3: {ranks.script}:{sleeps}",
        ]
        assert f'File "{ranks.script}", line {sleeps} in load' in said.stdout
        assert "distributed_c10d.py" in said.stdout
    assert all(process.poll() is None for process in ranks.processes)


def test_nobody_here_is_said(tmp_path):
    """Where no rank is open, or none is stopped, that is the answer."""
    environ = os.environ | {"DISTCTX_DIR": str(tmp_path / "none")}
    for command, status, says in (
        ("stacks", 1, "No rank of yours is open"),
        ("attach", 0, "No rank of yours is stopped"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "distctx", command],
            env=environ, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout.startswith(says)) == (status, True)
    assert not (tmp_path / "none").exists()


def test_a_rank_that_does_not_answer_is_no_end_of_it():
    """A terminal that waits in vain is told so, apart from a rank that has gone."""
    here, there = socket.socketpair()
    with contextlib.closing(Lines(here)) as wire, there:
        here.settimeout(0.05)
        with pytest.raises(TimeoutError):
            wire.receive()
        there.close()
        assert wire.receive() is None


# The door, in this process.


@pytest.fixture
def folder(monkeypatch):
    """A short path for a folder of names."""
    with tempfile.TemporaryDirectory(prefix="dx-") as base:
        path = Path(base) / "names"
        monkeypatch.setenv("DISTCTX_DIR", str(path))
        yield path


def test_opening_leaves_a_name_and_closing_takes_it_away(folder):
    """While it is open a rank is found; afterwards files, descriptors and the handler are as they
    were, and the signal harms nobody."""
    with DistributedRuntime():
        pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with DistributedRuntime() as rt:
            (name,) = debug.ranks_here(folder)
            assert (name.pid, name.rank, name.world_size) == (os.getpid(), 0, 1)
            assert name.stopped is None
            os.kill(os.getpid(), debug.ASKS_FOR_STACKS)
            assert "test_opening_leaves_a_name" in name.stacks()
            with DistributedRuntime():
                assert len(debug.ranks_here(folder)) == 1
            assert len(debug.ranks_here(folder)) == 1
            assert rt.rank == 0
        assert list(folder.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
    os.kill(os.getpid(), debug.ASKS_FOR_STACKS)
    assert (folder.stat().st_mode & 0o777) == 0o700


def test_somebody_elses_handler_is_kept(folder):
    """A handler for the signal that was there is called too, and is there afterwards."""
    called = threading.Event()
    before = signal.signal(debug.ASKS_FOR_STACKS, lambda *_: called.set())
    try:
        with DistributedRuntime():
            os.kill(os.getpid(), debug.ASKS_FOR_STACKS)
            assert called.wait(5)
            called.clear()
        os.kill(os.getpid(), debug.ASKS_FOR_STACKS)
        assert called.wait(5)
    finally:
        signal.signal(debug.ASKS_FOR_STACKS, before)


@pytest.mark.parametrize("fault", ["open to others", "a link", "a file"])
def test_a_folder_that_is_not_private_is_not_used(folder, fault, caplog):
    """The world opens all the same, and says why nobody can look; a breakpoint is an error."""
    if fault == "open to others":
        folder.mkdir()
        folder.chmod(0o777)
    elif fault == "a link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
    else:
        folder.touch()
    with DistributedRuntime() as rt:
        assert "no other terminal can look at this rank" in caplog.text
        with pytest.raises(RuntimeStateError, match="must be a folder of this user alone"):
            rt.breakpoint()
        with pytest.raises(RuntimeStateError, match="must be a folder of this user alone"):
            debug.require_private(folder)
    assert folder.is_file() or list(folder.iterdir()) == []


def test_what_the_dead_left_is_swept(folder):
    """A name whose process has ended, or whose number has passed on, is taken away."""
    with DistributedRuntime():
        (mine,) = debug.ranks_here(folder)
        long_ago = mine.began.partition(" ")[0] + " 1"
        for pid, began in ((2**22 + 1, long_ago), (os.getpid(), long_ago)):
            dead = mine._replace(path=folder / f"{pid}x.rank", pid=pid, began=began)
            dead.path.write_text(json.dumps(dead[1:]) + "\n")
            dead.stop_at(debug.Stopped("a.py", 1, "f"))
        elsewhere = mine._replace(path=folder / "elsewhere.rank", began="pid:[1] 1")
        elsewhere.path.write_text(json.dumps(elsewhere[1:]))  # of another container
        for number, text in enumerate(("{", "{}", "[1]", "")):
            (folder / f"bad{number}.rank").write_text(text)
        assert debug.ranks_here(folder) == [mine]
        assert {path.suffix for path in folder.iterdir()} == {".rank"}
        assert not (folder / f"{os.getpid()}x.rank").exists()
        assert elsewhere.path.exists()


def test_a_child_is_no_rank(folder):
    """What a fork inherits is its parent's: its end takes no name away."""
    with DistributedRuntime():
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                debug._forget_after_fork()
            os._exit(0)
        os.waitpid(pid, 0)
        assert len(debug.ranks_here(folder)) == 1


def test_a_simulated_rank_leaves_no_name(folder):
    """It can hang in no collective, and is no rank of any job."""
    with DistributedRuntime.simulate(3, 8):
        assert not folder.exists()


# Who is meant.

LAYOUT = MeshLayout((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    ("wanted", "when", "dims", "meant"),
    [
        (None, None, {}, {0}),
        (3, None, {}, {3}),
        ((1, 5), None, {}, {1, 5}),
        ([0], True, {}, {0}),
        ([0], False, {}, set()),
        (None, True, {}, set(range(8))),
        (None, 0, {}, set()),
        (None, None, {"dp": 1}, {4, 5, 6, 7}),
        (None, None, {"dp": 1, "tp": 2}, {6}),
        ((6, 7), True, {"tp": 3}, {7}),
    ],
)
def test_who_is_meant(wanted, when, dims, meant):
    """A rank, several, a condition, a place along a dim, and all of them together."""
    assert {r for r in range(8) if selects(LAYOUT, r, wanted, when, dims)} == meant


@pytest.mark.parametrize(
    ("wanted", "dims", "says"),
    [
        (8, {}, "rank=8 is outside this mesh"),
        ((0, 9), {}, "rank=9 is outside"),
        ("0", {}, "rank must be an int"),
        (None, {"cp": 0}, "'cp' is not a dim"),
        (None, {"dp": 2}, "dp=2 is out of range; it goes from 0 to 1"),
        (None, {"dp": True}, "dp must be an int"),
    ],
)
def test_who_cannot_be_meant(wanted, dims, says):
    """Alike on every rank, before anybody waits."""
    for rank in range(8):
        with pytest.raises(LayoutError, match=re.escape(says)):
            selects(LAYOUT, rank, wanted, None, dims)


def test_a_breakpoint_needs_an_open_runtime():
    """Before and after, it is an error that says so."""
    with pytest.raises(RuntimeStateError, match=r"breakpoint\(\) needs an open runtime"):
        DistributedRuntime().breakpoint()


@pytest.mark.distributed(4, mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
def test_where_nobody_is_meant_all_go_on(distributed_runtime):
    """A condition that holds nowhere stops nobody, again and again."""
    for _ in range(20):
        distributed_runtime.breakpoint(when=False)
    distributed_runtime.barrier()
