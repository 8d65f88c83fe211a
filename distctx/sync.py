"""Waiting for each other: a barrier, and one rank that goes first."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from distctx.bounded import run_bounded
from distctx.exceptions import (
    DistctxError,
    RemoteRankError,
    RendezvousError,
    RendezvousTimeoutError,
    RuntimeStateError,
)
from distctx.stores import PrefixStore, Store, backoff, peek, wait_for_count

if TYPE_CHECKING:
    from distctx.world import World

__all__ = ["barrier", "first", "next_turn", "show_life", "store_must_answer"]

#: Seconds between two signs of life from the rank that goes first, at the most; of a group's
#: timeout, a quarter.
_BEAT = 2.0
#: Seconds that the one who failed first stays until the others have read of it.
_LINGER = 2.0

_turns: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def barrier(world: World) -> None:
    """Wait for every rank of the world, for at most the group's timeout."""
    world.require_alive()
    try:
        if world.backend == "gloo":
            # torch's own barrier that says which rank did not come.
            dist.monitored_barrier(timeout=world.timeout, wait_all_ranks=True)
        elif world.device.index is not None and world.backend != "fake":
            dist.barrier(device_ids=[world.device.index])
        else:
            dist.barrier()
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        named = re.search(r"Ranks ([0-9, ]+) failed to pass", text)
        raise RendezvousTimeoutError(
            f"Rank {world.rank} waited in barrier(), for at most {world.timeout.total_seconds():g} "
            f"s: {text}",
            missing_ranks=[int(rank) for rank in named[1].split(",")] if named else (),
        ) from error


def next_turn(world: World, what: str) -> Store:
    """The part of the world's store for the next use of ``what``, which every rank makes alike.

    Counted with the group, not with the runtime: a group that is joined again has its old turns.

    Raises:
        RuntimeStateError: this world has no store.
    """
    if world.store is None:
        raise RuntimeStateError(
            f"{what} needs the store of the process group, and this torch does not give it; let "
            "distctx make the group."
        )
    counts = _turns.setdefault(world.group, {})
    counts[what] = counts.get(what, 0) + 1
    return PrefixStore(f"{what}/{counts[what]}", world.store)


def show_life(turn: Store, key: str, pause: float, done: threading.Event) -> threading.Thread:
    """Count on every ``pause`` seconds, for those who wait for this rank, until it is done."""

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone, and those who listen
            while not done.wait(pause):
                turn.add(key, 1)

    thread = threading.Thread(target=beat, name="distctx-beat", daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def store_must_answer(world: World, doing: str) -> Iterator[None]:
    """A wait in the store, whose loss is an error that says for what this rank waited.

    Raises:
        RendezvousError: the store was lost.
        RendezvousTimeoutError: a request to it was not answered.
    """
    try:
        yield
    except DistctxError:
        raise
    except TimeoutError as error:
        raise RendezvousTimeoutError(
            f"Rank {world.rank} got no answer from the store at {world.place} in {doing}; the "
            "process that serves it is stopped, or the network to it is down."
        ) from error
    except RuntimeError as error:
        raise RendezvousError(
            f"Rank {world.rank} lost the store at {world.place} while it waited in {doing}: "
            f"{str(error).splitlines()[0]}. The rank that it waited for, or the one that serves "
            "the store, has ended; look there for the first error."
        ) from error


@contextlib.contextmanager
def first(world: World, local: bool) -> Iterator[None]:
    """The body runs on the main rank, or the first of each host, and only then on the others.

    Nothing here is a collective, so a long body trips no timeout of the group. The others wait as
    long as the first shows signs of life; ``world.timeout`` without one is an error.
    """
    if world.is_alone:
        yield
        return
    environment = world.environment
    leads = environment.local_rank == 0 if local else world.rank == 0
    node = environment.node_rank
    host = socket.gethostname() if node is None else str(node)
    turn = PrefixStore(f"host/{host}" if local else "world", next_turn(world, "main_first()"))
    if leads:
        followers = world.world_size - 1
        if local:
            followers = (environment.local_world_size or 1) - 1
        with _leading(turn, world, followers):
            yield
        return
    _follow(turn, world)
    yield


@contextlib.contextmanager
def _leading(turn: Store, world: World, followers: int) -> Iterator[None]:
    done = threading.Event()
    pause = min(_BEAT, world.timeout.total_seconds() / 4)

    def end(text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone, and those who read it
            turn.set("end", f"{world.rank}\n{text}")

    thread = show_life(turn, "beat", pause, done)
    try:
        yield
    except BaseException as error:
        end("".join(traceback.format_exception(error))[-4000:])
        # This process may serve the store, and is about to end.
        wait_for_count(turn, "read", followers, time.monotonic() + _LINGER)
        raise
    else:
        end("")
        world.to_be_read.append((turn, "read", followers))
    finally:
        done.set()
        thread.join()


def _follow(turn: Store, world: World) -> None:
    """Wait for the one who goes first, in slices that each need an answer from the store."""
    beats, heard = 0, time.monotonic()
    bound = world.timeout.total_seconds()
    silence = RendezvousTimeoutError(
        f"Rank {world.rank} waited in main_first() for the rank that goes first, which gave no "
        f"sign of life for {bound:g} s; is it alive, and does it reach this line too?"
    )
    with store_must_answer(world, "main_first()"):
        for pause in backoff(longest=0.25):
            try:
                end, now_at = run_bounded(lambda: (peek(turn, "end"), turn.add("beat", 0)), bound)
            except TimeoutError as error:
                raise silence from error
            if end is not None:
                turn.add("read", 1)
                rank, _, text = end.partition("\n")
                if text:
                    raise RemoteRankError(
                        f"Rank {rank} failed in main_first(), so this rank cannot go on:\n{text}",
                        rank=int(rank),
                    )
                return
            if now_at != beats:
                beats, heard = now_at, time.monotonic()
            if time.monotonic() - heard > bound:
                raise silence
            time.sleep(pause)
