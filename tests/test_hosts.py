"""Two hosts, as two network namespaces with one cable between them, which can be cut.

Two ranks on each. MASTER_ADDR is the address of the first host, and rank 0 serves the store there.
Both have one hostname, which resolves to a loopback address; gloo listens where the hostname
resolves to, so it has to be told the interface.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launch import clean_environment, lacks

#: Ranks, and how many of them are on each host.
RANKS, LOCAL = 4, 2
#: Seconds: of every group, and how long ranks wait for each other.
GROUP, MEETING = 5.0, 8.0
#: Seconds beyond its time that a rank waits for a store that does not answer.
ANSWER = 6.0
#: Seconds that a busy machine may add to any bound.
SLACK = 6.0
ADDRESSES = ("10.213.7.1", "10.213.7.2")
#: The name of the cable's end on each host.
ENDS = ("dx-left", "dx-right")

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from distctx import DistributedRuntime

folder, group, meeting = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
rank = int(os.environ["RANK"])

def total(over):
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=over)
    return tensor.item()

def ready():
    (folder / f"{rank}.ready").touch()

def await_go():
    while not (folder / "go").exists():
        time.sleep(0.02)

def tell(**told):
    path = folder / f"{rank}.part"
    path.write_text(json.dumps({"at": time.monotonic(), **told}))
    path.rename(folder / f"{rank}.json")

started = time.monotonic()
try:
    with DistributedRuntime(
        mesh_shape=(-1, 2), mesh_dim_names=("dp", "tp"), timeout=group, rendezvous_timeout=meeting
    ) as rt:
BODY
except Exception as error:
    told = {"missing": getattr(error, "missing_ranks", ())}
    tell(error=type(error).__name__, text=str(error), after=time.monotonic() - started, **told)
    raise
"""


class Rank(NamedTuple):
    """What became of one rank."""

    told: dict[str, Any]
    status: int
    log: str

    @property
    def error(self) -> str:
        """The error that ended it, in one text."""
        return f"{self.told.get('error')}: {self.told.get('text')}"


class Hosts:
    """Two network namespaces with a cable between them, and the ranks that run in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = (f"dx{os.getpid()}l", f"dx{os.getpid()}r")
        self.processes: list[subprocess.Popen[bytes]] = []

    def build(self) -> None:
        """Make both, with addresses and the cable plugged in."""
        for name in self.names:
            _ip("netns", "add", name)
        peer = ["peer", "name", ENDS[1], "netns", self.names[1]]
        _ip("link", "add", ENDS[0], "netns", self.names[0], "type", "veth", *peer)
        for name, end, address in zip(self.names, ENDS, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", end, "up")

    def cut(self) -> float:
        """Cut the cable, at the second host; returns when."""
        _ip("-n", self.names[1], "link", "set", ENDS[1], "down")
        return time.monotonic()

    def start(
        self, body: str, *, group: float = GROUP, meeting: float = MEETING, interface: bool = True
    ) -> None:
        """Start all ranks of a program whose body runs in an open runtime ``rt``."""
        script = self.folder / "body.py"
        lines = "\n".join(f"        {line}" for line in body.splitlines())
        script.write_text(SCRIPT.replace("BODY", lines))
        for rank in range(RANKS):
            host, local = divmod(rank, LOCAL)
            environ = {
                "RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": LOCAL,
                "GROUP_RANK": host, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29500,
                "GLOO_SOCKET_IFNAME": ENDS[host], "DISTCTX_DIR": self.folder / f"n{host}",
            }  # fmt: skip
            if not interface:
                del environ["GLOO_SOCKET_IFNAME"]
            command = [sys.executable, script, self.folder, group, meeting]
            with (self.folder / f"{rank}.txt").open("w") as log:
                process = subprocess.Popen(
                    ["ip", "netns", "exec", self.names[host], *map(str, command)],
                    env=clean_environment({key: str(value) for key, value in environ.items()}),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            self.processes.append(process)

    def wait_ready(self) -> None:
        """Until every rank has said that it is ready."""
        end = time.monotonic() + 40
        while len(list(self.folder.glob("*.ready"))) < RANKS:
            if time.monotonic() > end or any(p.poll() is not None for p in self.processes):
                pytest.fail(f"not all ranks became ready:\n{self.logs()}")
            time.sleep(0.02)

    def go(self) -> None:
        """Let the ranks that wait for it go on."""
        (self.folder / "go").touch()

    def ended(self, within: float) -> list[Rank]:
        """All ranks, when they have ended; the test fails where they do not in time."""
        end = time.monotonic() + within
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(max(0.01, end - time.monotonic()))
        if late := [r for r, p in enumerate(self.processes) if p.poll() is None]:
            pytest.fail(f"ranks {late} did not end within {within:g} s:\n{self.logs()}")
        return [
            Rank(
                json.loads(path.read_text()) if path.exists() else {},
                process.returncode,
                (self.folder / f"{rank}.txt").read_text(),
            )
            for rank, process in enumerate(self.processes)
            for path in [self.folder / f"{rank}.json"]
        ]

    def logs(self) -> str:
        """What the ranks have said so far."""
        texts = [(self.folder / f"{r}.txt").read_text() for r in range(len(self.processes))]
        return "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts))

    def remove(self) -> None:
        """Kill the ranks, and then remove both hosts; the cable goes with them."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in self.names:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _ip("netns", "delete", name)


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts with a cable between them; skips where this process may not make them."""
    with tempfile.TemporaryDirectory(prefix="dx-") as folder:
        made = Hosts(Path(folder))
        try:
            try:
                made.build()
                _ip("netns", "exec", made.names[0], "true")
            except (OSError, subprocess.SubprocessError) as error:
                why = getattr(error, "stderr", None) or error
                lacks(f"network namespaces, which cannot be made here: {why}")
            yield made
        finally:
            made.remove()


def _all_fail(ranks: list[Rank], since: float, within: float) -> None:
    """Every rank raised within so many seconds of a moment, and then left with status 1."""
    for number, rank in enumerate(ranks):
        assert rank.status == 1, f"rank {number}: {rank.log}"
        assert rank.told["at"] - since < within, f"rank {number}: {rank.log}"


def test_two_hosts(hosts: Hosts) -> None:
    """Four ranks on two hosts have their places, and sum along dims that cross the cable or not."""
    sums = 'dp=total(rt.group("dp")), tp=total(rt.group("tp"))'
    hosts.start(
        f"tell(coordinate=rt.coordinate, local=rt.local_rank, {sums})", group=10, meeting=10
    )
    ranks = hosts.ended(40)
    assert [rank.status for rank in ranks] == [0] * RANKS, hosts.logs()
    assert [rank.told["coordinate"] for rank in ranks] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [rank.told["local"] for rank in ranks] == [0, 1, 0, 1]
    assert [rank.told["dp"] for rank in ranks] == [2, 4, 2, 4]
    assert [rank.told["tp"] for rank in ranks] == [1, 1, 5, 5]


def test_interface_is_not_said(hosts: Hosts) -> None:
    """Where gloo connects over loopback, which no other host can reach, the error says which
    variable to set, and no rank waits for longer than gloo does, five times the group's
    timeout."""
    hosts.start("pass", group=2, meeting=10, interface=False)
    ranks = hosts.ended(60)
    assert [rank.status for rank in ranks] == [1] * RANKS, hosts.logs()
    assert {rank.told["error"] for rank in ranks} == {"RendezvousError"}
    assert all(rank.told["after"] < 5 * 2 + ANSWER + SLACK for rank in ranks), hosts.logs()
    assert "GLOO_SOCKET_IFNAME" in "".join(rank.error for rank in ranks)


def test_cut_in_a_collective(hosts: Hosts) -> None:
    """Ranks that sum over a cable that is cut all end with an error once the group's time is over.
    It names the peers that cannot be reached: the ranks of the second host, or, there, the store
    on the first."""
    hosts.start('dp = rt.group("dp")\ntotal(dp)\nready()\nwhile True:\n    total(dp)', meeting=30)
    hosts.wait_ready()
    cut = hosts.cut()
    ranks = hosts.ended(25)
    _all_fail(ranks, cut, GROUP + SLACK)
    for number, rank in enumerate(ranks):
        assert "Timed out waiting 5000ms" in rank.error
        assert f"rank {number}/4 at" in rank.log
    for rank in ranks[:LOCAL]:
        assert re.search(
            r"had failed, rank 2 \(.*\), rank 3 \(.*\) had not: .*cannot be reached", rank.log
        )
    for rank in ranks[LOCAL:]:
        store = f"The store at {ADDRESSES[0]}:29500, which rank 0 serves,"
        assert f"{store} does not answer within 2 s: rank 0 was ended or stopped" in rank.log


def test_cut_before_the_meeting(hosts: Hosts) -> None:
    """Where the hosts cannot reach each other, the first names the ranks of the second, and those
    name the address that they cannot reach."""
    cut = hosts.cut()
    hosts.start("ready()")
    ranks = hosts.ended(40)
    _all_fail(ranks, cut, 40)
    for rank in ranks:
        assert rank.told["error"] == "RendezvousTimeoutError"
        assert rank.told["after"] < MEETING + ANSWER + 2
    for rank in ranks[:LOCAL]:
        assert rank.told["missing"] == [2, 3]
        assert "2, 3" in rank.error
    for rank in ranks[LOCAL:]:
        assert rank.told["missing"] == [0]
        assert f"{ADDRESSES[0]}:29500" in rank.error


def test_cut_before_the_mesh(hosts: Hosts) -> None:
    """Ranks that first touch the mesh after the cable was cut all end with an error in time."""
    hosts.start("ready()\nawait_go()\nrt.mesh")
    hosts.wait_ready()
    cut = hosts.cut()
    hosts.go()
    ranks = hosts.ended(40)
    _all_fail(ranks, cut, MEETING + ANSWER + SLACK)
    for rank in ranks[:LOCAL]:
        assert rank.told["missing"] == [2, 3]
        assert "ranks 2, 3 absent" in rank.error
    for rank in ranks[LOCAL:]:
        assert "RendezvousError" in rank.error
        assert f"no answer from the store at {ADDRESSES[0]}:29500" in rank.error
