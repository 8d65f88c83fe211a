"""The stores in which ranks meet: one per place and process, opened once and kept.

Opening a store again for each life is slow and flaky, so a store stays open until the interpreter
ends. A child made by fork must not use its parent's connections: it starts with none.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from torch.distributed.rendezvous import rendezvous

from distctx.environment import LaunchEnvironment, is_env
from distctx.exceptions import LaunchEnvironmentError, RendezvousError, RendezvousTimeoutError

if TYPE_CHECKING:  # torch.distributed has these, but its types do not say so
    from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore", "backoff", "open_store"]

log = logging.getLogger("distctx")

_kept: dict[str, Store] = {}
_of_parents: list[dict[str, Store]] = []


def _forget_after_fork() -> None:
    # Kept alive, not closed: ending a server's object joins threads that a child does not have.
    global _kept
    _of_parents.append(_kept)
    _kept = {}


os.register_at_fork(after_in_child=_forget_after_fork)


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
        url = urlsplit(init_method)
        if url.scheme == "file":
            return _open_file(url.path)
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
            _kept[key] = _connect(host, port, timeout, served)
    return _kept[key], place


def _open_file(path: str) -> tuple[Store, str]:
    key = f"file://{path}"
    if key not in _kept:
        folder = os.path.dirname(path)
        if not path or not os.path.isdir(folder):
            raise RendezvousError(
                f"init_method='{key}': there is no folder {folder!r} here; make it on every host, "
                "on a file system that all of them share."
            )
        _kept[key] = FileStore(path, -1)  # -1: the file outlives each life
    return _kept[key], path


def _open_other(url: str, environment: LaunchEnvironment, timeout: timedelta) -> tuple[Store, str]:
    """A scheme that somebody registered with torch."""
    if url not in _kept:
        bare = urlsplit(url)._replace(query="").geturl()
        handler = rendezvous(bare, environment.rank, environment.world_size, timeout=timeout)
        _kept[url] = next(iter(handler))[0]
    return _kept[url], url


def _serve(host: str, port: int, timeout: timedelta) -> Store:
    try:
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen_on_loopback(host, port),
        )
    except (RuntimeError, OSError) as error:
        taken = str(errno.EADDRINUSE) in str(error) or "in use" in str(error).lower()
        why = "the port is taken by another process" if taken else f"{error}".splitlines()[0]
        raise RendezvousError(
            f"Rank 0 cannot serve the store at {host}:{port}: {why}. Pass another port in "
            "MASTER_PORT or init_method on every rank; `ss -ltnp` shows who holds this one."
        ) from error


def _listen_on_loopback(host: str, port: int) -> int | None:
    """A socket that listens on loopback alone, where that is the address; else torch's own, which
    listens on all interfaces."""
    if host != "localhost" and not host.startswith("127."):
        return None
    with socket.create_server((host, port)) as listener:
        return listener.detach()


def _connect(host: str, port: int, timeout: timedelta, served: bool) -> Store:
    """A client. The socket is probed first: torch's client waits for twice its timeout and more."""
    start = time.monotonic()
    deadline = start + timeout.total_seconds()
    failure: OSError | None = None
    for pause in backoff():
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            socket.create_connection((host, port), timeout=min(left, 5.0)).close()
        except OSError as error:
            failure = error
            time.sleep(min(pause, left))
            continue
        try:
            bound = timedelta(seconds=max(left, 1.0))
            return TCPStore(host, port, is_master=False, timeout=bound, wait_for_workers=False)
        except RuntimeError as error:
            raise RendezvousError(
                f"Something listens at {host}:{port}, but it does not answer as a torch store: "
                f"{str(error).splitlines()[0]}. Is the port used by another program?"
            ) from error
    who = "The launcher's store" if served else "Rank 0"
    raise RendezvousTimeoutError(
        f"{who} does not answer at {host}:{port} within {timeout.total_seconds():g} s "
        f"({failure}). Without it nothing is known of the other ranks. Check that rank 0 was "
        "started and is alive, that every rank has the same address and port, that the name "
        "resolves here, and that no firewall stands between.",
        missing_ranks=() if served else (0,),
    ) from failure


def backoff(shortest: float = 0.0002, longest: float = 1.0) -> Iterator[float]:
    """Pauses in seconds for a wait: a quarter of what has passed, from 0.2 ms to 1 s."""
    start = time.monotonic()
    while True:
        yield min(max((time.monotonic() - start) / 4, shortest), longest)
