"""The tree of errors, and the names that distctx gives away."""

from __future__ import annotations

import importlib
import pickle

import pytest

import distctx
from distctx import exceptions
from launch import run

PUBLIC_NAMES = [
    "DTENSOR_AVAILABLE",
    "DistctxError",
    "DistributedRuntime",
    "GroupConflictError",
    "LaunchEnvironment",
    "LaunchEnvironmentError",
    "LayoutError",
    "MeshLayout",
    "Partition",
    "RankDisagreementError",
    "RemoteRankError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RuntimeStateError",
    "State",
    "build_device_mesh",
    "ensure_distributed_initialized",
    "resolve_data_parallel_partition",
    "resolve_tensor_parallel_group_size",
]

BASES = {
    "DistctxError": (RuntimeError,),
    "LaunchEnvironmentError": (exceptions.DistctxError, ValueError),
    "LayoutError": (exceptions.DistctxError, ValueError),
    "RendezvousError": (exceptions.DistctxError,),
    "RendezvousTimeoutError": (exceptions.RendezvousError, TimeoutError),
    "RankDisagreementError": (exceptions.RendezvousError,),
    "GroupConflictError": (exceptions.DistctxError,),
    "RemoteRankError": (exceptions.DistctxError,),
    "RuntimeStateError": (exceptions.DistctxError,),
}


@pytest.mark.parametrize(("name", "bases"), BASES.items(), ids=BASES)
def test_tree(name, bases):
    """Each error stands below its own parent and a builtin that fits it."""
    assert getattr(exceptions, name).__bases__ == bases


def test_tree_is_whole():
    """There is no error beside the ones of the tree, and its picture shows each of them."""
    assert sorted(exceptions.__all__) == sorted(BASES)
    drawn = exceptions.__doc__.split()
    assert set(BASES) <= set(drawn)


@pytest.mark.parametrize("name", ["LaunchEnvironmentError", "LayoutError", "RuntimeStateError"])
def test_message_is_the_text(name):
    """An error that carries nothing else reads as its message."""
    assert str(getattr(exceptions, name)("what is wrong")) == "what is wrong"


@pytest.mark.parametrize(
    ("error", "attribute", "value"),
    [
        (exceptions.RendezvousTimeoutError("late", [1, 3]), "missing_ranks", (1, 3)),
        (exceptions.RendezvousTimeoutError("late"), "missing_ranks", ()),
        (
            exceptions.RankDisagreementError("differ", {0: {"shape": 2}, 1: {"shape": 4}}),
            "values",
            {0: {"shape": 2}, 1: {"shape": 4}},
        ),
        (exceptions.RemoteRankError("failed", 3), "rank", 3),
    ],
    ids=["missing_ranks", "nobody missing", "values", "rank"],
)
def test_error_carries_what_it_is_about(error, attribute, value):
    """What a program may want to know of an error is an attribute, beside the message."""
    assert getattr(error, attribute) == value
    assert str(error) in {"late", "differ", "failed"}


def test_public_names_are_pinned():
    """distctx gives away exactly these names."""
    assert sorted(distctx.__all__) == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_is_there(name):
    """Each public name can be had from distctx, is the one of its own module, and is listed."""
    value = getattr(distctx, name)
    home = importlib.import_module(f"distctx.{distctx._HOME[name]}")
    assert value is getattr(home, name)
    assert name in dir(distctx)


def test_absent_name_is_an_attribute_error():
    """A name that distctx does not have is refused as any module would."""
    with pytest.raises(AttributeError, match="'distctx' has no attribute 'nothing'"):
        _ = distctx.nothing
    with pytest.raises(ImportError, match="nothing"):
        exec("from distctx import nothing")


@pytest.mark.parametrize("module", ["distctx", "distctx.exceptions"])
def test_import_is_light(module):
    """Importing distctx or its errors imports neither torch nor attrs."""
    ended = run(
        "-c", f"import sys, {module}; print(*{{'torch', 'attr', 'attrs'}} & {{*sys.modules}})"
    )
    assert (ended.stdout.strip(), ended.stderr, ended.returncode) == ("", "", 0)


@pytest.mark.parametrize(
    "error",
    [
        exceptions.RendezvousTimeoutError("late", missing_ranks=(1, 3)),
        exceptions.RankDisagreementError(
            "not alike", {0: {"backend": "gloo"}, 1: {"backend": "nccl"}}
        ),
        exceptions.RemoteRankError("failed", rank=3),
        exceptions.LayoutError("no"),
    ],
)
def test_errors_cross_processes(error):
    """An error is the same after pickling, with what it carries."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
