"""The stores in which ranks meet: one per place and process, opened once and kept.

Opening a store again for each life is slow and flaky, so a store stays open until the interpreter
ends. A child made by fork must not use its parent's connections: it starts with none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

from torch.distributed.rendezvous import rendezvous

from distctx.bounded import run_bounded
from distctx.environment import LaunchEnvironment, is_env
from distctx.exceptions import LaunchEnvironmentError, RendezvousError, RendezvousTimeoutError
from distctx.progress import Progress

if TYPE_CHECKING:  # torch.distributed has these, but its types do not say so
    from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "await_key",
    "backoff",
    "discard",
    "is_served",
    "open_store",
    "peek",
    "wait_for_count",
]

#: Seconds in which a launcher's store, which should be there, has to answer before it is probed.
_AT_ONCE = 10.0

_kept: dict[str, Store] = {}
_of_parents: list[dict[str, Store]] = []


def _forget_after_fork() -> None:
    # Kept alive, not closed: ending a server's object joins threads that a child does not have.
    global _kept
    _of_parents.append(_kept)
    _kept = {}


os.register_at_fork(after_in_child=_forget_after_fork)


def discard(store: Store) -> None:
    """Do not keep a store that has failed: the next life opens it again."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    for key in [key for key, kept in _kept.items() if kept is store]:
        del _kept[key]


def is_served(store: Store) -> bool:
    """Whether a process serves the store to others, so that it goes with that process."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return not isinstance(store, (FileStore, HashStore))


def open_store(
    environment: LaunchEnvironment, init_method: str | None, timeout: timedelta
) -> tuple[Store, str]:
    """The store of a launch, and its place in words. Rank 0 serves it, unless the launcher does.

    Raises:
        RendezvousError: rank 0 cannot listen there.
        RendezvousTimeoutError: nobody answers there within ``timeout``.
    """
    if is_env(init_method):
        host, port = environment.master_addr, environment.master_port
        served = environment.store_is_served
    else:
        url = urlsplit(str(init_method))
        if url.scheme == "file":
            return _open_file(str(init_method), url.netloc, url.path)
        if url.scheme != "tcp":
            return _open_other(str(init_method), environment, timeout)
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host = port = None
        served = False
    if host is None or port is None:
        raise LaunchEnvironmentError(
            f"init_method={init_method!r} names no host and port; wanted 'tcp://host:port'."
        )
    place = f"{host}:{port}"
    key = f"tcp://{place}"
    if key not in _kept:
        if environment.rank == 0 and not served:
            _kept[key] = _serve(host, port, timeout)
        else:
            _kept[key] = _connect(host, port, timeout, served, environment.rank)
    return _kept[key], place


def _open_file(url: str, host: str, path: str) -> tuple[Store, str]:
    """A file that all ranks see; another file at the same path is another store."""
    if host not in ("", "localhost") or not path:
        raise LaunchEnvironmentError(
            f"init_method={url!r} names no absolute path; wanted 'file:///folder/file'."
        )
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        about = os.fstat(number)
        os.close(number)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
    except OSError as error:
        raise RendezvousError(
            f"The ranks cannot meet in the file {path!r}: {error.strerror}. It must be one that "
            "this process may make and write, on a file system that all ranks share."
        ) from error
    key = f"file://{path}?{about.st_dev}:{about.st_ino}"
    if key not in _kept:
        _kept[key] = FileStore(path, -1)  # -1: the file outlives each life
    return _kept[key], path


def _open_other(url: str, environment: LaunchEnvironment, timeout: timedelta) -> tuple[Store, str]:
    """A scheme that somebody registered with torch."""
    if url not in _kept:
        parts = urlsplit(url)
        rest = [(k, v) for k, v in parse_qsl(parts.query) if k not in ("rank", "world_size")]
        bare = parts._replace(query=urlencode(rest)).geturl()
        try:
            handler = rendezvous(bare, environment.rank, environment.world_size, timeout=timeout)
            _kept[url] = next(iter(handler))[0]
        except RuntimeError as error:
            raise RendezvousError(f"torch cannot open init_method={url!r}: {error}") from error
    return _kept[url], url


def _serve(host: str, port: int, timeout: timedelta) -> Store:
    def serve() -> Store:
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen_on_loopback(host, port),
        )

    try:
        return run_bounded(serve, timeout.total_seconds())
    except (RuntimeError, OSError) as error:
        if "in use" in str(error).lower() or getattr(error, "errno", 0) == errno.EADDRINUSE:
            why = (
                "the port is taken by another process. Pass another port in MASTER_PORT or "
                "init_method on every rank; `ss -ltnp` shows who holds this one."
            )
        else:
            why = (
                f"{str(error).splitlines()[0]}. Is {host!r} a name or an address of this host, and "
                "the same on every rank?"
            )
        raise RendezvousError(f"Rank 0 cannot serve the store at {host}:{port}: {why}") from error


def _listen_on_loopback(host: str, port: int) -> int | None:
    """A socket that listens on loopback alone, where that is the address; else torch's own, which
    listens on all interfaces."""
    if host != "localhost" and not host.startswith("127."):
        return None
    with socket.create_server((host, port)) as listener:
        return listener.detach()


def _connect(host: str, port: int, timeout: timedelta, served: bool, rank: int) -> Store:
    """A client of a store that another process serves."""
    end = time.monotonic() + timeout.total_seconds()
    if served:
        # A launcher's store is there before its workers. It is not probed, since torch's server
        # looks up the name of each peer before it goes on, which can take it seconds.
        with contextlib.suppress(RuntimeError, TimeoutError):
            return _client(host, port, min(timeout.total_seconds(), _AT_ONCE))
    # torch's client waits for twice its timeout and more where nobody listens.
    failure = _wait_for_listener(host, port, end, aloud=rank == (0 if served else 1))
    if failure is None:
        try:
            return _client(host, port, max(end - time.monotonic(), 1.0))
        except (RuntimeError, TimeoutError) as error:
            raise RendezvousError(
                f"Something listens at {host}:{port}, but it does not answer as a torch store: "
                f"{str(error).splitlines()[0]}. Is the port used by another program?"
            ) from error
    who = "The launcher's store" if served else "Rank 0"
    raise RendezvousTimeoutError(
        f"{who} does not answer at {host}:{port} within {timeout.total_seconds():g} s ({failure}). "
        "Without it nothing is known of the other ranks. Check that rank 0 was started and is "
        "alive, that every rank has the same address and port, that the name resolves here, and "
        "that no firewall stands between.",
        missing_ranks=() if served else (0,),
    ) from failure


def _wait_for_listener(host: str, port: int, end: float, *, aloud: bool) -> OSError | None:
    """Wait until somebody listens, at most until ``end``; why nobody could be reached, or None."""
    pauses = backoff()
    with contextlib.closing(Progress(end - time.monotonic())) as progress:
        while True:
            left = end - time.monotonic()
            try:
                socket.create_connection((host, port), timeout=min(max(left, 0.1), 5.0)).close()
                return None
            except OSError as error:
                if left <= 0:
                    return error
                if progress.is_due():
                    progress.tell(f"the store at {host}:{port}", f"to answer: {error}", aloud=aloud)
            time.sleep(max(0.0, min(next(pauses), left)))


def _client(host: str, port: int, seconds: float) -> Store:
    def connect() -> Store:
        return TCPStore(
            host,
            port,
            is_master=False,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )

    return run_bounded(connect, seconds)


def backoff(shortest: float = 0.0002, longest: float = 1.0) -> Iterator[float]:
    """Pauses in seconds for a wait: a quarter of what has passed, from 0.2 ms to 1 s."""
    start = time.monotonic()
    while True:
        yield min(max((time.monotonic() - start) / 4, shortest), longest)


def peek(store: Store, key: str) -> str | None:
    """The value under ``key``, or None, in one request and without waiting.

    ``get`` waits for a key that is not there; ``compare_set`` answers with the value, or with what
    it was told to expect where there is none (and then sets nothing).
    """
    value = store.compare_set(key, "?", "?").decode()
    return None if value == "?" else value


def await_key(store: Store, key: str, bound: float) -> str | None:
    """The value under ``key``, waited for at most ``bound`` seconds; None where none came."""
    end = time.monotonic() + bound
    for pause in backoff(longest=0.1):
        if (value := peek(store, key)) is not None or time.monotonic() > end:
            return value
        time.sleep(pause)
    return None


def wait_for_count(store: Store, key: str, number: int, end: float) -> bool:
    """Whether a counter reaches ``number``, for which it waits until ``end``; False if it does not.

    A store that has gone counts as reached: there is nobody left to wait for.
    """
    pauses = backoff(longest=0.1)
    with contextlib.suppress(RuntimeError):
        while store.add(key, 0) < number:
            if time.monotonic() > end:
                return False
            time.sleep(next(pauses))
    return True
