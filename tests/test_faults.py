"""The fault matrix: what the others see, and within which bound, when one rank meets a fault.

Rows are faults, columns the moments at which they strike; every cell is three real processes on one
TCP store that rank 0 serves. README.rst has the table of what the user sees.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from faults import FAULTS, MOMENTS
from launch import HERE, clean_environment

RANKS = 3
#: Seconds: how long ranks wait for each other, and how long a collective may take.
MEETING, GROUP = 1.5, 4.0
#: Seconds beyond its time that a rank waits for a store that does not answer.
ANSWER = 6.0
#: Seconds that a busy machine may add to any bound.
SLACK = 6.0


class Rank(NamedTuple):
    """What became of one rank; ``told`` is empty for one that was killed, or still runs."""

    told: dict[str, Any]
    status: int | None
    log: str


class Nursery:
    """The process that forks ranks for this module."""

    def __init__(self) -> None:
        self.output, theirs = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=theirs,
            text=True,
        )
        os.close(theirs)
        self.read_ahead = b""

    def line(self, end: float) -> Any:
        """The next line, as JSON, or None where none comes before ``end``."""
        while b"\n" not in self.read_ahead:
            left = max(0.0, end - time.monotonic())
            if not select.select([self.output], [], [], left)[0]:
                return None
            self.read_ahead += os.read(self.output, 65536)
        line, _, self.read_ahead = self.read_ahead.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """End the nursery."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(10) == 0
        os.close(self.output)

    def start(self, environs: list[dict[str, str]], function: str, argument: Any, out: Path) -> Any:
        """Fork a rank for each environment; returns their pids."""
        request = {"ranks": environs, "call": ["faults", function, argument], "out": str(out)}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.line(time.monotonic() + 60)

    def gather(
        self, pids: list[int], out: Path, bound: float, leave: set[int] | None = None
    ) -> list[Rank]:
        """Wait until all ranks but those to leave have ended; the rest is killed.

        Where they do not end within ``bound`` seconds, the test fails with the stacks of all.
        """
        ended: dict[int, int] = {}
        end = time.monotonic() + bound
        wanted = set(range(len(pids))) - (leave or set())
        while wanted - set(ended) and (line := self.line(end)) is not None:
            ended[line[0]] = line[1]
        late = wanted - set(ended)
        for index in late:
            os.kill(pids[index], signal.SIGUSR1)
        time.sleep(0.5 if late else 0)
        for index, pid in enumerate(pids):
            if index not in ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        by_kill = set(range(len(pids))) - set(ended)
        while by_kill and (line := self.line(time.monotonic() + 10)) is not None:
            by_kill.discard(line[0])
        ranks = [self.read(out, index, ended.get(index)) for index in range(len(pids))]
        if late:
            logs = "\n".join(f"rank {i}:\n{rank.log}" for i, rank in enumerate(ranks))
            pytest.fail(f"ranks {sorted(late)} did not end within {bound:g} s:\n{logs}")
        return ranks

    def read(self, out: Path, index: int, status: int | None) -> Rank:
        """What a rank left."""
        path = out / f"{index}.json"
        told = json.loads(path.read_text()) if status is not None and path.exists() else {}
        return Rank(told, status, (out / f"{index}.txt").read_text())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """A nursery that has imported torch."""
    nursery = Nursery()
    yield nursery
    nursery.close()


def free_port() -> int:
    """A port that is free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(ranks: int = RANKS, host: str = "127.0.0.1", port: int | None = None) -> list[Any]:
    """The environments of a launch on this machine."""
    same = {"MASTER_ADDR": host, "MASTER_PORT": str(port or free_port()), "WORLD_SIZE": str(ranks)}
    return [same | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def cells() -> Iterator[Any]:
    """The reachable cells, with the victim's rank."""
    for fault in FAULTS:
        for moment in MOMENTS:
            if fault == "late" and moment == "closing":
                continue  # a rank that is slow to close is no fault
            both = fault in ("absent", "SIGKILL", "SIGSTOP", "raise", "sys.exit")
            victims = (1, 0) if both else (1,)
            for victim in victims:
                if (fault, moment, victim) == ("SIGSTOP", "during init", 0):
                    continue  # torch itself waits there for its store, and without bound
                yield pytest.param(
                    fault, moment, victim, id=f"{fault} {moment} rank {victim}".replace(" ", "-")
                )


#: The errors of faults that the victim lives to raise.
RAISED = {"raise": "KeyError", "sys.exit": "SystemExit", "Ctrl-C": "KeyboardInterrupt"}


def wanted_note(fault: str, victim: int, pid: int) -> str:
    """What a rank learns of another that did not come to a collective."""
    who = rf"ank {victim} \(.*, pid {pid}\)"
    if fault in RAISED or fault == "BdbQuit":
        return rf"R{who} failed first: {RAISED.get(fault, fault)}\b"
    if victim == 0 and fault in ("SIGKILL", "SIGSTOP"):  # it served the store
        return r"which rank 0 serves, .*: rank 0 was ended or stopped"
    return rf"had failed, r{who} had not: it "


@pytest.mark.parametrize(("fault", "moment", "victim"), list(cells()))
def test_matrix(nursery: Nursery, tmp_path: Path, fault: str, moment: str, victim: int) -> None:
    """Each other rank ends within its bound, with the error that fits, or with its result."""
    late = {"during init": 1.0, "in a collective": 1.0}.get(moment, 2 * MEETING)
    plan = {
        "fault": fault,
        "moment": moment,
        "victim": victim,
        "late": late,
        "timeout": GROUP,
        "rendezvous_timeout": MEETING,
    }
    pids = nursery.start(launch(), "life", plan, tmp_path)
    stays = {victim} if fault in ("absent", "SIGSTOP") else set()
    ranks = nursery.gather(pids, tmp_path, MEETING + GROUP + ANSWER + SLACK, stays)
    others = [rank for index, rank in enumerate(ranks) if index != victim]
    ended = "rank 0 is lost" if victim == 0 else "rank 1 is lost"
    for rank in others:
        told = rank.told
        assert told, f"{ended}, and this one too:\n{rank.log}"
        assert told.get("type") != "AssertionError", told
        seconds = told["seconds"]
        if moment in ("before meeting", "first mesh"):
            assert told["type"] in ("RendezvousTimeoutError", "RendezvousError"), told
            if told["type"] == "RendezvousTimeoutError":
                assert told["missing"] == [victim], told
            assert seconds < 2 * MEETING + ANSWER + SLACK
        elif moment == "closing" or fault == "late":
            assert told.get("value") == RANKS, told
            assert seconds < late + 3 + SLACK
        elif moment == "during init":
            assert told["type"] == "RendezvousError", told
            lost = victim == 0 and "lost the store" in told["text"]  # before it had read its go
            assert lost or "All ranks met, but then" in told["text"]
        else:
            assert told["type"] == "RuntimeError", told
            assert seconds < (GROUP if fault in ("absent", "SIGSTOP") else 1) + 2 + SLACK
            pid = pids[victim]
            assert re.search(wanted_note(fault, victim, pid), told["notes"][1]), told
    own = ranks[victim]
    if fault in RAISED or fault == "BdbQuit":
        assert own.told["type"] == RAISED.get(fault, fault), own
        assert own.told["seconds"] < late + MEETING + SLACK
        if moment not in ("before meeting", "during init"):
            assert f"rank {victim}/{RANKS} at (dp={victim}) on " in own.told["notes"][0]


def test_disagreement_before_the_meeting(nursery: Nursery, tmp_path: Path) -> None:
    """Ranks that want different meshes are all told within two seconds."""
    by_rank = {"1": {"mesh_shape": [1, 3]}}
    arguments = {"mesh_shape": [3, 1], "timeout": 30, "by_rank": by_rank}
    pids = nursery.start(launch(), "open_and_close", arguments, tmp_path)
    for rank in nursery.gather(pids, tmp_path, 20):
        assert rank.told["type"] == "RankDisagreementError"
        assert rank.told["values"]["1"] == {"mesh_shape": [1, 3]}


def test_a_port_that_another_program_has(nursery: Nursery, tmp_path: Path) -> None:
    """Rank 0 says at once that its port is taken; the others end within their time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = {"timeout": GROUP, "rendezvous_timeout": MEETING}
        environs = launch(port=listener.getsockname()[1])
        pids = nursery.start(environs, "open_and_close", arguments, tmp_path)
        first, *others = nursery.gather(pids, tmp_path, MEETING * 4 + SLACK)
    assert first.told["type"] == "RendezvousError"
    assert "port is taken" in first.told["text"]
    for rank in others:
        assert rank.told["type"] in ("RendezvousError", "RendezvousTimeoutError"), rank
        assert "127.0.0.1" in rank.told["text"]


def test_an_address_that_does_not_resolve(nursery: Nursery, tmp_path: Path) -> None:
    """Every rank says which name it could not reach, within its time."""
    arguments = {"timeout": GROUP, "rendezvous_timeout": MEETING}
    environs = launch(host="no-such-host.invalid")
    pids = nursery.start(environs, "open_and_close", arguments, tmp_path)
    for rank in nursery.gather(pids, tmp_path, MEETING + GROUP + SLACK):
        assert rank.told["type"] in ("RendezvousError", "RendezvousTimeoutError"), rank
        assert "no-such-host.invalid" in rank.told["text"]


def test_a_bad_environment(nursery: Nursery, tmp_path: Path) -> None:
    """A launch that contradicts itself is refused at once, with every variable at fault."""
    environs = [one | {"WORLD_SIZE": "1", "RANK": "7"} for one in launch(1)]
    pids = nursery.start(environs, "open_and_close", {}, tmp_path)
    (rank,) = nursery.gather(pids, tmp_path, 20)
    assert rank.told["type"] == "LaunchEnvironmentError"
    assert "RANK=7 must be less than WORLD_SIZE=1" in rank.told["text"]
    assert rank.told["seconds"] < 1


@pytest.mark.parametrize(
    ("where", "waits", "waiting", "ranks"),
    [
        ("rank 0", 0, [0], 2),
        ("store", 1, [1], 2),
        ("mesh", 1, [0, 1], 2),
        ("mesh", 0, [0, 1], 2),
        ("main_first", 1, [0, 1], 2),
    ],
)
def test_ctrl_c_acts_at_once(
    nursery: Nursery, tmp_path: Path, where: str, waits: int, waiting: list[int], ranks: int
) -> None:
    """Ctrl-C during a wait ends it at once: for ranks, the store, the mesh, main_first."""
    plan = {"where": where, "waits": waits}
    environs = [one for index, one in enumerate(launch(ranks)) if index in waiting]
    pids = nursery.start(environs, "wait_for_a_signal", plan, tmp_path)
    time.sleep(1.5)
    index = waiting.index(waits)
    os.kill(pids[index], signal.SIGINT)
    start = time.monotonic()
    told = nursery.gather(pids, tmp_path, 10, set(range(len(pids))) - {index})[index].told
    assert told["type"] == "KeyboardInterrupt"
    assert time.monotonic() - start < 3
