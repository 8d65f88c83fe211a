"""What only an open runtime has: its device, its mesh and groups, and waiting for the others."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from distctx.arguments import are_names
from distctx.exceptions import RuntimeStateError
from distctx.layout import Dim
from distctx.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from distctx.mesh_cache import MeshCache
    from distctx.world import Hold, World

__all__ = ["Opened", "State"]


class State(enum.Enum):
    """Where a runtime is in its life."""

    UNOPENED = "unopened"  # made, and nothing acquired yet
    OPEN = "open"  # everything is acquired
    CLOSED = "closed"  # everything is given back; may be opened again


def _listed(dims: tuple[Dim, ...]) -> str:
    return ", ".join(map(repr, dims))


@attrs.define(eq=False, repr=False)
class Opened(Settings):
    """The half of a runtime that needs its world; ``DistributedRuntime`` begins and ends it."""

    _state: State = attrs.field(init=False, default=State.UNOPENED)
    _hold: Hold | None = attrs.field(init=False, default=None)
    _submeshes: dict[tuple[Dim, ...], DeviceMesh] = attrs.field(init=False, factory=dict)
    _groups: dict[tuple[Dim, ...], ProcessGroup] = attrs.field(init=False, factory=dict)

    @property
    def state(self) -> State:
        """UNOPENED, OPEN or CLOSED. Talks to nobody."""
        return self._state

    @property
    def owns_process_group(self) -> bool:
        """Whether closing this runtime now would destroy the process group. Talks to nobody."""
        return self._hold is not None and self._hold.ends_the_world

    @property
    def device(self) -> torch.device:
        """The device of this process. Talks to nobody.

        Raises:
            RuntimeStateError: not open.
        """
        return self._life("device").device

    @property
    def backend(self) -> str:
        """The backend of the process group. Talks to nobody.

        Raises:
            RuntimeStateError: not open.
        """
        return self._life("backend").backend

    # The mesh: these talk to every rank, the first time.

    @property
    def mesh(self) -> DeviceMesh:
        """The DeviceMesh of all dims. The first touch of it, of ``submesh`` or of ``group`` talks
        to every rank, and every rank must come; after that it is the same object and talks to
        nobody.

        Raises:
            RuntimeStateError: not open.
            RendezvousTimeoutError: some ranks did not come here; names them.
            RankDisagreementError: the ranks came for different things.
            RendezvousError: the store was lost, or the ranks could not connect to each other.
        """
        return self._built("mesh").root()

    def submesh(self, *dims: Dim) -> DeviceMesh:
        """The mesh along ``dims``, in mesh order; no dims: the mesh. Talks to every rank at first
        use.

        Raises:
            LayoutError: no such dim, or not in mesh order.
            RuntimeStateError: not open.
            RendezvousError: and its kinds, as for ``mesh``.
        """
        try:
            return self._submeshes[dims]
        except (KeyError, TypeError):  # no list is a key, nor a dim
            pass
        cache = self._built(f"submesh({_listed(dims)})")
        found = cache.submesh(self.layout.in_order(dims))
        if are_names(dims):
            self._submeshes[dims] = found
        return found

    def group(self, *dims: Dim) -> ProcessGroup:
        """The process group along ``dims``; several: the one that spans them; no dims: WORLD.
        Talks to every rank at first use.

        Raises:
            LayoutError: no such dim, or not in mesh order.
            RuntimeStateError: not open.
            RendezvousError: and its kinds, as for ``mesh``.
        """
        try:
            return self._groups[dims]
        except (KeyError, TypeError):  # no list is a key, nor a dim
            pass
        cache = self._built(f"group({_listed(dims)})")
        found: ProcessGroup
        found = cache.group(self.layout.in_order(dims)) if dims else self._life("group").group
        if are_names(dims):
            self._groups[dims] = found
        return found

    # Waiting for each other.

    def barrier(self) -> None:
        """Wait for every rank, for at most the group's timeout. Talks to every rank.

        Raises:
            RendezvousTimeoutError: a rank did not come in time; on gloo the main rank's error names
                it, in words and in ``missing_ranks``.
        """
        from distctx import sync

        sync.barrier(self._life("barrier()"))

    def main_first(self, *, local: bool = False) -> contextlib.AbstractContextManager[None]:
        """A block that the main rank runs first, and the others when it is done. Talks to every
        rank.

        No collective is open meanwhile, so a long body trips no timeout of the group.

        Args:
            local: the first rank of each host goes first, in place of rank 0.

        Raises:
            RemoteRankError: the one that goes first failed in its body; raised on the others.
            RendezvousTimeoutError: it gave no sign of life for the group's timeout.

        Example:
            >>> from distctx import DistributedRuntime
            >>> with DistributedRuntime() as rt, rt.main_first():
            ...     print("rank", rt.rank, "prepares the data, the others find it ready")
            rank 0 prepares the data, the others find it ready
        """
        from distctx import sync

        life = self._life("main_first()")
        if local:
            _ = self.local_rank
        return sync.first(life, local)

    def breakpoint(
        self, rank: int | Sequence[int] | None = None, *, when: object = None, **dims: int
    ) -> None:
        """Stop one rank in pdb, in the line after this one; the others wait until it goes on.
        Every rank must come here. Talks to every rank, through the store alone.

        The others wait in no collective, so no group times out however long a person thinks. At a
        terminal of its own the rank is in plain pdb; elsewhere, as under torchrun, it prints the
        ``python -m distctx attach`` that opens it. ``c`` lets all go on, ``release`` lets the
        others go on while this one is stepped, ``q`` ends every rank, with exit status 0.

        Args:
            rank: who stops, one or several. None: rank 0, unless ``when`` or a dim says who.
            when: stop only where this is true; each rank decides for itself.
            dims: stop only those at this index along a dim, such as ``dp=0``.

        Raises:
            RuntimeStateError: not open.
            LayoutError: no such rank, dim or index.
            RemoteRankError: a rank ended while it was stopped; raised on those that waited.
            RendezvousTimeoutError: a rank did not come here within the group's timeout.
            RendezvousError: the store was lost.
        """
        from distctx import breakpoints

        life = self._life("breakpoint()")
        meant = breakpoints.selects(self.layout, self.rank, rank, when, dims)
        breakpoints.stop(life, self.layout, meant, sys._getframe(1))

    def __dir__(self) -> Iterator[str]:
        # Completion and variable panes read every name they find here, and reading `mesh` builds
        # it.
        hidden = () if self._hold is not None and self._hold.cache.is_built else ("mesh",)
        return (name for name in object.__dir__(self) if name not in hidden)

    # Within.

    def _life(self, what: str) -> World:
        return self._open_hold(what).world

    def _built(self, what: str) -> MeshCache:
        return self._open_hold(what).cache

    def _open_hold(self, what: str) -> Hold:
        if self._hold is None:
            raise RuntimeStateError(
                f"{what} needs an open runtime, and this one is {self._state.value}; ask inside "
                "`with rt:`, or after rt.open()."
            )
        if not self._hold.is_here:
            raise RuntimeStateError(
                f"{what} is not to be had in a child of the process that opened the runtime. Pass "
                "it what needs no other rank, such as rt.dp_partition or rt.layout."
            )
        return self._hold
