"""The meeting itself, on real stores: threads are the ranks, since a store does not know."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distctx import (
    LaunchEnvironment,
    RankDisagreementError,
    RendezvousError,
    RendezvousTimeoutError,
    bounded,
    stores,
)
from distctx.meeting import Meeting
from distctx.rendezvous import _Guest, meet
from distctx.stores import peek, wait_for_count


class Counting:
    """A store that notes the requests that go through it and through its prefixes."""

    def __init__(self, store: dist.Store, requests: list[str]) -> None:
        self.store, self.requests = store, requests

    def __getattr__(self, name: str) -> Any:
        def noted(*args: Any) -> Any:
            self.requests.append(name)
            return getattr(self.store, name)(*args)

        return noted


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> dist.Store:
    """A store of each kind."""
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), -1)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def come(
    store: dist.Store,
    rank: int,
    world_size: int,
    seconds: float = 20.0,
    expected: int = 0,
    **wants: Any,
) -> Meeting:
    """One rank comes to meet."""
    return meet(
        store,
        rank,
        world_size,
        wants,
        timedelta(seconds=seconds),
        place="the test",
        purpose="to test",
        need_local=wants.pop("need_local", False),
        expected=expected,
    )


def there(room: dist.Store) -> list[int]:
    """Which of the ranks 0 to 3 have arrived in a room."""
    return [rank for rank in range(4) if peek(room, f"rank/{rank}")]


def together(*acts: Callable[[], Any]) -> list[Any]:
    """What each act returned or raised, all begun at once, each in a thread."""
    results: list[Any] = [None] * len(acts)

    def one(index: int) -> None:
        try:
            results[index] = acts[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def wait_until(is_so: Callable[[], object]) -> bool:
    """Whether it became so within some seconds."""
    deadline = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(is_so())


def test_all_get_the_same_word(store: dist.Store) -> None:
    """Ranks that meet share a token, new at each meeting, and a prefix of their own."""
    tokens = set()
    for life in range(5):
        acts = [lambda r=r: come(store, r, 4, shape=[2, 2]) for r in range(4)]
        met = together(*acts)
        assert len({one.token for one in met}) == 1
        tokens.add(met[0].token)
        met[0].store.set("key", str(life))
        assert [one.store.get("key").decode() for one in met] == [str(life)] * 4
    assert len(tokens) == 5


def test_peek_reads_without_waiting(store: dist.Store) -> None:
    """peek gives a key's value, or None at once, and sets nothing."""
    assert peek(store, "key") is None
    assert not store.check(["key"])
    store.set("key", "value")
    assert peek(store, "key") == "value"


def test_local_ranks_come_from_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for it is told which of its host it is, in the order of ranks."""
    store = dist.HashStore()
    hosts = {"MainThread": "?"}
    monkeypatch.setattr(socket, "gethostname", lambda: hosts[threading.current_thread().name])
    for index, host in enumerate("abab"):
        hosts[f"rank {index}"] = host

    def one(rank: int) -> Meeting:
        threading.current_thread().name = f"rank {rank}"
        return come(store, rank, 4, need_local=True)

    met = together(*(lambda r=r: one(r) for r in range(4)))
    assert [one.local for one in met] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_old_rooms_are_left_alone(store: dist.Store) -> None:
    """Rooms of a run that was killed, settled or not, hold nobody up."""
    for _ in range(3):
        room = dist.PrefixStore(str(store.add("rooms", 1)), store)
        room.set("rank/1", json.dumps({"rank": 1, "host": "dead", "pid": 1, "wants": {}}))
    acts = [lambda r=r: time.sleep(0.3 * (r == 0)) or come(store, r, 2) for r in range(2)]
    met = together(*acts)
    assert met[0].token == met[1].token


def test_who_was_kept_out_of_a_dead_room_follows_to_the_next(store: dist.Store) -> None:
    """A rank started again finds its own dead self in the last room, which a rank that was never
    in it joins and leaves; all three meet in the new one."""
    room = dist.PrefixStore(str(store.add("rooms", 1)), store)
    room.set("rank/2", json.dumps({"rank": 2, "host": "dead", "pid": 1, "wants": {}}))

    def rank_zero() -> Meeting:
        assert wait_until(lambda: peek(room, "twice"))  # rank 2 stands before the door
        assert wait_until(lambda: peek(room, "rank/1"))
        assert room.compare_set("verdict", "", "left").decode() == "left"  # rank 1 was the faster
        return come(store, 0, 3)

    met = together(rank_zero, lambda: come(store, 1, 3), lambda: come(store, 2, 3))
    assert len({one.token for one in met}) == 1


@pytest.mark.parametrize("late", [0, 1, 3])
def test_the_last_may_come_late(late: int) -> None:
    """Whoever comes last, within the time, all meet."""
    store = dist.HashStore()
    acts = [lambda r=r: time.sleep(0.5 * (r == late)) or come(store, r, 4) for r in range(4)]
    assert len({one.token for one in together(*acts)}) == 1


def test_disagreement_is_told_to_all(store: dist.Store) -> None:
    """Every rank gets what each asked for, only where it differs."""
    acts = [lambda r=r: come(store, r, 4, shape=[4 if r == 2 else 2], same=1) for r in range(4)]
    for error in together(*acts):
        assert isinstance(error, RankDisagreementError)
        assert error.values == {r: {"shape": [4 if r == 2 else 2]} for r in range(4)}
        assert "ranks 0, 1, 3: shape=(2,)" in str(error)
        assert "rank 2: shape=(4,)" in str(error)


def test_disagreement_does_not_wait_for_the_absent() -> None:
    """Ranks that disagree are told soon, though others have not come."""
    store = dist.HashStore()
    start = time.monotonic()
    acts = [lambda r=r: come(store, r, 4, shape=r) for r in range(2)]
    errors = together(*acts)
    assert time.monotonic() - start < 5
    assert all(isinstance(error, RankDisagreementError) for error in errors)


def test_a_rank_of_another_world_size_is_told(store: dist.Store) -> None:
    """A rank that believes in a larger world, outside this one, is met and named."""
    errors = together(*(lambda r=r, s=s: come(store, r, s, 2.0) for r, s in {0: 3, 5: 6}.items()))
    for error in errors:
        assert isinstance(error, RankDisagreementError)
        assert error.values == {0: {"world_size": 3}, 5: {"world_size": 6}}


def test_the_absent_are_named_to_all_who_came(store: dist.Store) -> None:
    """When time is over, each rank that came names the absent, the present and the place."""
    for error in together(*(lambda r=r: come(store, r, 5, 0.7) for r in (0, 2, 4))):
        assert isinstance(error, RendezvousTimeoutError)
        assert error.missing_ranks == (1, 3)
        assert "2 of 5 ranks did not come to test within 0.7 s at the test: ranks 1, 3" in str(
            error
        )
        assert f"rank 2 ({socket.gethostname()}, pid " in str(error)


def test_one_whose_time_is_over_gives_up_for_all() -> None:
    """A rank cannot leave while another says go: the first to give up settles the room."""
    store = dist.HashStore()
    waits = {0: 20.0, 1: 0.5}
    start = time.monotonic()
    errors = together(*(lambda r=r: come(store, r, 3, waits[r]) for r in (0, 1)))
    assert time.monotonic() - start < 10
    assert [error.missing_ranks for error in errors] == [(2,), (2,)]


def test_without_rank_zero_only_that_is_known() -> None:
    """Without rank 0 there is no room; the others say so when their time is over."""
    (error,) = together(lambda: come(dist.HashStore(), 1, 2, 0.3))
    assert isinstance(error, RendezvousTimeoutError)
    assert error.missing_ranks == (0,)


def test_who_comes_late_does_not_start() -> None:
    """A rank that comes after the others gave up waits for a new room, and says why it has none."""
    store = dist.HashStore()
    together(lambda: come(store, 0, 2, 0.2))
    (error,) = together(lambda: come(store, 1, 2, 0.3))
    assert error.missing_ranks == (0,)
    assert "The last meeting there failed before this rank came: 1 of 2" in str(error)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_two_processes_with_one_rank(rank: int) -> None:
    """Where two claim a rank, every process gets an error that says which rank and who."""
    store = dist.HashStore()
    ranks = [0, 1, 2, rank] if rank else [0, 0, 1]
    errors = together(*(lambda r=r: come(store, r, 4, 3.0) for r in ranks))
    taken = [error for error in errors if type(error) is RendezvousError]
    assert taken
    assert all(f"claim rank {rank}" in str(error) for error in taken)
    assert all(isinstance(error, RendezvousError) for error in errors)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupted_wait_takes_its_arrival_back(rank: int) -> None:
    """A wait that is interrupted leaves no arrival behind, so the rank can come again."""
    store = dist.HashStore()
    if rank:
        store.add("rooms", 1)  # the room of a rank 0 that waits

    class Stop(BaseException):
        pass

    def stop(_: float) -> None:
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distctx.rendezvous.time.sleep", stop)
        with pytest.raises(Stop):
            come(store, rank, 2)
    room = dist.PrefixStore("1", store)
    assert room.add("kinds", 0) == 0
    assert there(room) == []
    met = together(*(lambda r=r: come(store, r, 2) for r in range(2)))
    assert met[0].token == met[1].token


def test_a_meeting_leaves_no_ring_of_objects(store: dist.Store) -> None:
    """Else the garbage collector would have to come for it, which stops a rank, and all who wait
    for it, for a tenth of a second."""
    gc.collect()
    gc.disable()
    try:
        together(*(lambda r=r: come(store, r, 3) for r in range(3)))
        assert wait_until(lambda: not any(type(o) is _Guest for o in gc.get_objects()))
    finally:
        gc.enable()


def test_who_comes_to_those_who_are_gone_is_not_let_go(store: dist.Store) -> None:
    """All others had come to a room, waited in vain and ended: a rank that was started again is the
    last of all there, and meets the others where they are now."""
    store.add("rooms", 1)
    old = dist.PrefixStore("1", store)
    for rank in (0, 2, 3):
        guest = _Guest(store, rank, 4, {"world_size": 4}, timedelta(seconds=9), "", "", False, 0)
        assert guest._arrive(old)  # and is killed there

    def others(rank: int) -> Meeting:
        assert wait_until(lambda: there(old) == [0, 1, 2, 3])
        return come(store, rank, 4)

    met = together(lambda: come(store, 1, 4), *(lambda r=r: others(r) for r in (0, 2, 3)))
    assert {one.number for one in met} == {2}
    assert len({one.token for one in met}) == 1


def test_a_room_that_is_expected_is_not_waited_for(store: dist.Store) -> None:
    """Who expects a room is in it before rank 0 opens it, and is met there."""
    room = dist.PrefixStore("1", store)

    def open_it() -> Meeting:
        assert wait_until(lambda: there(room) == [1, 2])
        assert store.add("rooms", 0) == 0
        return come(store, 0, 3)

    met = together(open_it, *(lambda r=r: come(store, r, 3, expected=1) for r in (1, 2)))
    assert len({one.token for one in met}) == 1
    assert {one.number for one in met} == {1}


def test_the_last_to_come_to_a_room_of_the_world_lets_all_go(store: dist.Store) -> None:
    """There nobody can be of an earlier run, so nobody waits for rank 0 to say it."""
    store.add("rooms", 1)
    room = dist.PrefixStore("1", store)
    wants = {"world_size": 3}
    busy = _Guest(store, 0, 3, wants, timedelta(seconds=9), "", "", None, 1)
    assert busy._arrive(room) == 1
    met = together(*(lambda r=r: come(store, r, 3, expected=1) for r in (1, 2)))
    assert met[0].token == met[1].token == busy._settle(room, "go").token


def test_what_is_expected_may_be_wrong(store: dist.Store) -> None:
    """A room that is over is not joined, and one that rank 0 passes over is left."""
    together(*(lambda r=r: come(store, r, 2) for r in range(2)))
    met = together(lambda: come(store, 0, 2), lambda: come(store, 1, 2, expected=1))
    assert [one.number for one in met] == [2, 2]
    store.add("rooms", 1)  # opened by a rank 0 that was interrupted
    met = together(lambda: come(store, 0, 2), lambda: come(store, 1, 2, expected=3))
    assert [one.number for one in met] == [4, 4]


def test_without_rank_0_those_in_an_expected_room_name_all_who_are_missing() -> None:
    """They were there before rank 0, so they know; and rank 0 does not join what they gave up."""
    store = dist.HashStore()
    errors = together(*(lambda r=r: come(store, r, 4, 0.3, expected=1) for r in (1, 2)))
    assert [type(error) for error in errors] == [RendezvousTimeoutError] * 2
    assert [error.missing_ranks for error in errors] == [(0, 3)] * 2
    met = together(*(lambda r=r: come(store, r, 4, expected=min(r, 1)) for r in range(4)))
    assert [one.number for one in met] == [2] * 4


@pytest.mark.parametrize("world_size", [2, 8, 32])
def test_requests_do_not_grow_with_the_world(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are a fixed number a rank, and a fixed number for each pause while one waits."""
    store, pauses, requests = dist.HashStore(), [], []

    def prefixed(prefix: str, inner: Any) -> Counting:
        return Counting(dist.PrefixStore(prefix, inner.store), inner.requests)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    sleep = time.sleep
    monkeypatch.setattr("distctx.rendezvous.PrefixStore", prefixed)
    monkeypatch.setattr("distctx.rendezvous.time.sleep", pause)
    counting = Counting(store, requests)
    together(*(lambda r=r: come(counting, r, world_size) for r in range(world_size)))
    assert len(requests) <= 10 * world_size + 7 * len(pauses)


def test_nobody_listens_is_an_error_in_time() -> None:
    """A client of a port where nobody listens gives up after its time, not a multiple of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = LaunchEnvironment("torchrun", 1, 2, master_addr="127.0.0.1", master_port=port)
    start = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match="Rank 0 does not answer") as caught:
        stores.open_store(environment, None, timedelta(seconds=0.5))
    assert time.monotonic() - start < 3
    assert caught.value.missing_ranks == (0,)


def test_a_taken_port_is_an_error_at_once() -> None:
    """Rank 0 says at once that its port is taken, and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = LaunchEnvironment("torchrun", 0, 2, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(RendezvousError, match="port is taken by another process"):
            stores.open_store(environment, None, timedelta(seconds=20))


def test_a_name_that_does_not_resolve_is_said() -> None:
    """A host that no name service knows is an error after the rendezvous timeout that says so."""
    environment = LaunchEnvironment(
        "torchrun", 1, 2, master_addr="no-such-host.invalid", master_port=29500
    )
    with pytest.raises(RendezvousTimeoutError, match=r"[Nn]ame"):
        stores.open_store(environment, None, timedelta(seconds=0.5))


def test_a_store_is_kept() -> None:
    """The same place is one store in a process, however often it is opened."""
    environment = LaunchEnvironment("torchrun", 0, 2, master_addr="127.0.0.1", master_port=0)
    first, _ = stores.open_store(environment, None, timedelta(seconds=5))
    again, _ = stores.open_store(environment, None, timedelta(seconds=5))
    assert again is first


def test_a_count_is_waited_for_in_bounds() -> None:
    """A count that is reached ends the wait; one that is not ends with its bound."""
    store = dist.HashStore()
    assert not wait_for_count(store, "built", 1, time.monotonic() + 0.1)
    Meeting("word", store, 1).report_built()  # returns before the store knows
    assert wait_for_count(store, "built", 1, time.monotonic() + 10)
    assert wait_for_count(store, "built", 1, time.monotonic())


def test_why_the_others_could_not_build_is_told() -> None:
    """A rank that fails after the meeting says why, and the others' error names it."""
    meeting = Meeting("word", dist.HashStore(), 1)
    meeting.report_failure(1, ValueError("no device"))
    meeting.report_failure(2, ValueError("later"))
    error = meeting.not_built("the group", RuntimeError("wait timeout"))
    assert "the group could not be made here: wait timeout" in str(error)
    assert "The first to fail was rank 1: ValueError: no device" in str(error)


@pytest.mark.parametrize("seed", range(12))
def test_nobody_is_let_go_in_half_a_world(seed: int) -> None:
    """With rank 0 claimed twice, each world that starts is whole: no go for less than all ranks."""
    store, chance = dist.HashStore(), random.Random(seed)
    ranks = [0, 0, 1, 2, 3]
    pauses = [chance.random() / 50 for _ in ranks]

    def one(rank: int, pause: float) -> Meeting:
        time.sleep(pause)
        return come(store, rank, 4, 1.0)

    met = together(*(lambda r=r, p=p: one(r, p) for r, p in zip(ranks, pauses, strict=True)))
    tokens = Counter(one.token for one in met if isinstance(one, Meeting))
    assert set(tokens.values()) <= {4}
    assert all(isinstance(one, (Meeting, RendezvousError)) for one in met)


def test_counts_that_are_just_changing_are_no_disagreement() -> None:
    """Counts that do not add up, as while a rank withdraws, are no disagreement by themselves."""
    store = dist.HashStore()
    dist.PrefixStore("1", store).add("arrived", 1)  # counted, and not there
    error = together(lambda: come(store, 0, 3, 0.5))[0]
    assert type(error) is RendezvousTimeoutError


def test_a_world_size_beyond_reason_costs_little() -> None:
    """A rank that believes in millions of others is told in bounded time."""
    store = dist.HashStore()
    sizes = {0: 2, 1: 3_000_000}
    start = time.monotonic()
    errors = together(*(lambda r=r, s=s: come(store, r, s) for r, s in sizes.items()))
    assert time.monotonic() - start < 10
    assert all(isinstance(error, RankDisagreementError) for error in errors)


def test_a_silent_listener_is_an_error_in_time() -> None:
    """A program that listens and never answers is an error after the timeout, open to Ctrl-C."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        environment = LaunchEnvironment("torchrun", 1, 2, master_addr="127.0.0.1", master_port=port)
        start = time.monotonic()
        with pytest.raises(RendezvousError, match="does not answer as a torch store"):
            stores.open_store(environment, None, timedelta(seconds=1))
        assert time.monotonic() - start < 5


def test_a_store_that_failed_is_not_kept() -> None:
    """A store that is lost is opened again in the next life."""
    environment = LaunchEnvironment("torchrun", 0, 2, master_addr="127.0.0.1", master_port=0)
    first, _ = stores.open_store(environment, None, timedelta(seconds=5))
    stores.discard(dist.PrefixStore("a", dist.PrefixStore("b", first)))
    again, _ = stores.open_store(environment, None, timedelta(seconds=5))
    assert again is not first


@pytest.mark.parametrize("path", ["/dev/null", "/proc/nofile", "/"])
def test_what_is_no_file_to_meet_in(path: str) -> None:
    """A path that is no regular file, or cannot be made, is an error at once."""
    environment = LaunchEnvironment("none", 0, 2)
    with pytest.raises(RendezvousError, match="cannot meet in the file"):
        stores.open_store(environment, f"file://{path}", timedelta(seconds=5))


def test_another_file_at_the_same_path_is_another_store(tmp_path: Path) -> None:
    """A file that was removed is not met in again, though its path is the same."""
    environment, url = LaunchEnvironment("none", 0, 2), f"file://{tmp_path}/store"
    first, _ = stores.open_store(environment, url, timedelta(seconds=5))
    assert stores.open_store(environment, url, timedelta(seconds=5))[0] is first
    (tmp_path / "store").rename(tmp_path / "kept")
    assert stores.open_store(environment, url, timedelta(seconds=5))[0] is not first


def test_calls_share_a_thread_and_leave_none() -> None:
    """Call after call runs in one thread, a call meanwhile in another, and each ends when no more
    come. One that is stuck is not waited for, and a child of a fork has its own."""
    names = lambda: [t.name for t in threading.enumerate() if t.name == "distctx-call"]  # noqa: E731
    assert wait_until(lambda: not names())
    used = {bounded.run_bounded(threading.get_ident, 5) for _ in range(50)}
    assert len(used) <= 2  # the first call may still be about to end when the second comes
    both = threading.Barrier(2)
    bounded.run_aside(lambda: both.wait(5))
    bounded.run_bounded(lambda: both.wait(5), 5)
    stuck = threading.Event()
    with pytest.raises(TimeoutError):
        bounded.run_bounded(stuck.wait, 0.1)
    assert bounded.run_bounded(lambda: 7, 5) == 7
    child = os.fork()
    if child == 0:
        os._exit(bounded.run_bounded(lambda: 7, 5))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stuck.set()
    assert wait_until(lambda: not names())


def test_what_a_call_returned_is_not_kept() -> None:
    """A thread that waits for the next call holds nothing of the last one."""

    class Group:
        pass

    gone = weakref.ref(bounded.run_bounded(Group, 5))
    assert wait_until(lambda: gone() is None)


def test_a_store_that_never_answers_is_an_error_in_time() -> None:
    """A call that never comes back is given up in time, and Ctrl-C is heard meanwhile."""
    start, heard = time.monotonic(), threading.Event()
    with pytest.raises(TimeoutError):
        bounded.run_bounded(lambda: time.sleep(30), 0.3)
    with pytest.raises(KeyError):
        bounded.run_bounded(lambda: {}["x"], 5)
    assert bounded.run_bounded(lambda: 7, 5) == 7
    threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        bounded.run_bounded(lambda: time.sleep(5), 30, heard.set)
    assert heard.is_set()
    assert time.monotonic() - start < 5
