"""Waiting for each other: a barrier, and one rank that goes first."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from distctx.exceptions import RemoteRankError, RendezvousTimeoutError
from distctx.rendezvous import peek
from distctx.stores import PrefixStore, Store, backoff

if TYPE_CHECKING:
    from distctx.world import World

__all__ = ["barrier", "first"]

log = logging.getLogger("distctx")

#: Seconds between two signs of life from the rank that goes first, at the most; of a group's
#: timeout, a quarter.
_BEAT = 2.0


def barrier(world: World) -> None:
    """Wait for every rank of the world, for at most the group's timeout."""
    if world.backend == "gloo":
        # torch's own barrier that says which rank did not come.
        dist.monitored_barrier(timeout=world.timeout, wait_all_ranks=True)
    elif world.device.type != "cpu" and world.device.index is not None and world.backend != "fake":
        dist.barrier(device_ids=[world.device.index])
    else:
        dist.barrier()


@contextlib.contextmanager
def first(world: World, local: bool) -> Iterator[None]:
    """The body runs on the main rank, or the first of each host, and only then on the others.

    Nothing here is a collective, so a long body trips no timeout of the group. The others wait as
    long as the first shows signs of life; ``world.timeout`` without one is an error.
    """
    environment = world.environment
    leads = environment.local_rank == 0 if local else world.rank == 0
    if world.store is None or world.world_size == 1:
        yield
        return
    node = environment.node_rank
    host = socket.gethostname() if node is None else str(node)
    world.turns += 1
    scope = f"host/{host}" if local else "world"
    turn = PrefixStore(f"first/{world.turns}/{scope}", world.store)
    if leads:
        with _leading(turn, world.rank, min(_BEAT, world.timeout.total_seconds() / 4)):
            yield
        return
    _follow(turn, world)
    yield


@contextlib.contextmanager
def _leading(turn: Store, rank: int, pause: float) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(pause):
            try:
                turn.add("beat", 1)
            except RuntimeError:
                return

    thread = threading.Thread(target=beat, name="distctx-main-first", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        text = "".join(traceback.format_exception(error))[-4000:]
        turn.set("end", f"{rank}\n{text}")
        raise
    else:
        turn.set("end", f"{rank}\n")
    finally:
        done.set()
        thread.join()


def _follow(turn: Store, world: World) -> None:
    beats, heard = 0, time.monotonic()
    bound = world.timeout.total_seconds()
    for pause in backoff():
        if (end := peek(turn, "end")) is not None:
            rank, _, text = end.partition("\n")
            if text:
                raise RemoteRankError(
                    f"Rank {rank} failed in main_first(), so this rank cannot go on:\n{text}",
                    rank=int(rank),
                )
            return
        if (now_at := turn.add("beat", 0)) != beats:
            beats, heard = now_at, time.monotonic()
        if time.monotonic() - heard > bound:
            raise RendezvousTimeoutError(
                f"Rank {world.rank} waited in main_first() for the rank that goes first, which "
                f"gave "
                f"no sign of life for {bound:g} s; is it alive, and does it reach this line too?"
            )
        time.sleep(pause)
