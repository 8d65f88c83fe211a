"""Looking never communicates: on one rank of four, with all that people look with."""

from __future__ import annotations

import contextlib
import inspect
import pprint
import rlcompleter
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distctx import DistctxError, _torch
from launch import need


def with_repr(rt: Any) -> None:
    """A prompt, a log line, a format."""
    assert repr(rt) == f"{rt}" == str(rt)
    pprint.pformat({"rt": rt})


def with_getattr(rt: Any) -> None:
    """A variables pane: every name that dir shows, and that of everything it finds there."""
    for name in dir(rt):
        with contextlib.suppress(DistctxError):
            value = getattr(rt, name)
            if not callable(value):
                repr(value)


def with_inspect(rt: Any) -> None:
    """help() and documentation tools."""
    with contextlib.suppress(DistctxError):
        inspect.getmembers(rt)
    inspect.getmembers_static(rt)


def with_rlcompleter(rt: Any) -> None:
    """TAB at a plain prompt and in pdb."""
    completer = rlcompleter.Completer({"rt": rt})
    found = [completer.complete("rt.", state) for state in range(200)]
    assert "rt.dp_partition" in found
    assert completer.complete("rt.sub", 0) == "rt.submesh("


def with_ipython(rt: Any) -> None:
    """TAB in IPython and in a notebook."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance(user_ns={"rt": rt})
    try:
        for use_jedi in (False, True):
            shell.Completer.use_jedi = use_jedi
            for text in ("rt.", "rt.mes", "rt.group(", "rt.layout."):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PendingDeprecationWarning)  # IPython's own
                    shell.complete(text)
    finally:
        InteractiveShell.clear_instance()


def with_comparison(rt: Any) -> None:
    """A set, a dict, an equality."""
    assert rt == rt
    assert rt != object()
    assert len({rt, rt}) == 1
    assert hash(rt) == hash(rt)


def with_pictures(rt: Any) -> None:
    """A notebook's display, a table, a grid."""
    assert "<table" in rt._repr_html_()
    rt.draw("tp")
    for rank in range(rt.world_size):
        str(rt.describe(rank))


LOOKS = [
    with_repr,
    with_getattr,
    with_inspect,
    with_rlcompleter,
    with_ipython,
    with_comparison,
    with_pictures,
]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.distributed(4, mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"), guards=False)
def test_looking_on_one_rank(distributed_runtime: Any, look: Callable[[Any], None]) -> None:
    """No group is made and nobody is met: a collective of all four works afterwards, and so does
    the first touch of the mesh."""
    if look is with_ipython:
        need("IPython")  # on every rank alike
    rt = distributed_runtime
    before = _torch.number_of_groups()
    if rt.rank == 2:
        look(rt)
        assert _torch.number_of_groups() == before == 1
        assert "mesh not built" in repr(rt)
    total = torch.tensor([rt.rank])
    dist.all_reduce(total)
    assert total.item() == 6
    dist.all_reduce(total, group=rt.group("tp"))
    assert total.item() == 12


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.distributed(2, mesh_shape=(1, 2), mesh_dim_names=("dp", "tp"), guards=False)
def test_looking_with_a_mesh(distributed_runtime: Any, look: Callable[[Any], None]) -> None:
    """Nor where the mesh is there."""
    if look is with_ipython:
        need("IPython")
    rt = distributed_runtime
    mesh, groups = rt.mesh, _torch.number_of_groups()
    if rt.rank == 1:
        look(rt)
        assert _torch.number_of_groups() == groups
    assert rt.mesh is mesh
    dist.barrier()
