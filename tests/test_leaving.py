"""Whose fault an error is, and what ranks tell and ask of it. test_faults.py and test_hosts.py do
the same with real faults."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from distctx import (
    DistributedRuntime,
    LayoutError,
    RankDisagreementError,
    RendezvousTimeoutError,
)
from distctx.leaving import Farewell


def farewell(error: BaseException, rank: int = 0, world_size: int = 2, store: Any = None) -> Any:
    """Of one rank of a world that is no more than its numbers."""
    world = SimpleNamespace(
        rank=rank, world_size=world_size, server="the launcher", place="node0:29500", to_be_read=[]
    )
    return Farewell(world, store, error)


@pytest.mark.parametrize(
    "text",
    [
        "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3472",
        "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3472: Connection reset by peer",
        "[/x/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 5000ms for send operation",
        "wait timeout after 2000ms, keys: /default_pg/0//x",
        "Timeout waiting for key: default_pg/0/x after 2000 ms",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2) ran for 60 milliseconds",
    ],
)
def test_errors_of_others(text: str) -> None:
    """What torch says where another rank has gone, or does not come, is that one's fault."""
    assert farewell(RuntimeError(text)).is_of_others
    assert farewell(RuntimeError(text)).asks


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad data"),
        RuntimeError("DataLoader timed out after 60 seconds"),
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        ConnectionResetError("Connection reset by peer"),
        LayoutError("a mesh_shape that cannot be"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_errors_of_its_own(error: BaseException) -> None:
    """Everything else is a rank's own."""
    assert not farewell(error).is_of_others


def test_errors_that_name_the_others() -> None:
    """An error that says which rank is at fault is never the first; one that says why asks no
    more."""
    absent = RendezvousTimeoutError("absent", missing_ranks=(1,))
    assert farewell(absent).is_of_others
    assert farewell(absent).asks
    assert farewell(RankDisagreementError("they differ", {})).is_of_others
    assert not farewell(RankDisagreementError("they differ", {})).asks


def test_a_wrapped_error_is_the_fault_of_what_it_came_from() -> None:
    """An error raised from another's, and an exit because of it, are not a rank's own."""

    def caught(act: Any, cause: str = "Connection closed by peer") -> BaseException:
        try:
            try:
                raise RuntimeError(cause)
            except RuntimeError as error:
                act(error)
        except BaseException as error:
            return error
        raise AssertionError

    def wrap(error: Exception) -> None:
        raise KeyError("step 7") from error

    assert farewell(caught(wrap)).is_of_others
    assert farewell(caught(lambda _: sys.exit(1))).is_of_others
    assert not farewell(caught(wrap, "no space left")).is_of_others

    def begin_again(error: BaseException) -> None:
        error.add_note("[distctx] rank 0/2")  # it has ended a life
        raise KeyError("in the next life")

    assert not farewell(caught(begin_again)).is_of_others


def test_an_error_that_cannot_be_written() -> None:
    """An exception whose text fails is told by its type."""

    class Bad(Exception):
        def __str__(self) -> str:
            raise AttributeError

    store = dist.HashStore()
    farewell(Bad(), 1, store=store).tell()
    lost = RuntimeError("Connection closed by peer")
    one = farewell(lost, 0, store=store)
    one.tell()
    assert one.ask().endswith("failed first: Bad")


class Counting:
    """A store that counts the requests to it."""

    def __init__(self) -> None:
        self.store, self.number = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.number += 1
        return getattr(self.store, name)


def test_many_ranks() -> None:
    """Two of ten thousand ranks find out in a few hundred requests that all others have not
    failed, and their names fit."""
    size = 10_000
    lost = RuntimeError("Connection closed by peer")
    stores = [Counting(), Counting()]
    stores[1].store = stores[0].store
    ranks = [farewell(lost, rank, size, stores[rank]) for rank in (0, 1)]
    for one in ranks:
        one.tell()
    said: list[str] = [""] * 2

    def ask(rank: int) -> None:
        said[rank] = ranks[rank].ask()

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[0] == said[1]
    assert "had failed, ranks 2, 3, 4," in said[0]
    assert len(said[0]) < 400
    assert sum(store.number for store in stores) < 400


def test_one_that_comes_later_looks_again() -> None:
    """A rank that fails after others have looked is not told that it has not failed."""
    store = dist.HashStore()
    lost = RuntimeError("Timed out waiting 5000ms")
    for rank, absent in ((3, "rank 0, rank 1, rank 2"), (0, "rank 1, rank 2")):
        one = farewell(lost, rank, 4, store)
        one.tell()
        assert f"had failed, {absent} had not" in one.ask()


def test_a_store_that_is_lost() -> None:
    """A rank whose store has gone says which, and who serves it; and does not wait."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    del server
    one = farewell(RuntimeError("Connection closed by peer"), store=client)
    one.tell()
    assert one.ask() == (
        "The store at node0:29500, which the launcher serves, is lost: the launcher was ended or "
        "stopped, or the network to it is down."
    )


def test_ctrl_c_while_it_closes_leaves_nothing() -> None:
    """Ctrl-C in the wait for ranks that still connect ends the wait, and the world."""
    rt = DistributedRuntime().open()
    assert rt._hold is not None
    rt._hold.world.to_be_read.append((dist.HashStore(), "never", 1))
    thread = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        rt.close()
    thread.join()
    assert not dist.is_initialized()
    assert rt.state.name == "CLOSED"


def test_a_generator_that_is_dropped_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A life in a generator that nobody runs to its end is closed as one without an error."""
    aborts: list[bool] = []
    close = DistributedRuntime.close

    def noting_close(rt: DistributedRuntime, *, abort: bool = False) -> None:
        aborts.append(abort)
        close(rt, abort=abort)

    monkeypatch.setattr(DistributedRuntime, "close", noting_close)

    def batches() -> Any:
        with DistributedRuntime() as rt:
            yield rt.rank

    running = batches()
    next(running)
    running.close()
    assert aborts == [False]
    assert not dist.is_initialized()
