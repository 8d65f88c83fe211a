"""Which backend and which device: decided on stand-ins for ``torch.cuda``, since no GPU is here."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import counting_store
from distctx import DistributedRuntime, LaunchEnvironmentError, devices


class Accelerator(SimpleNamespace):
    """As much of ``torch.cuda`` as is asked here, with every change of the current device noted."""

    def __init__(self, count: int, current: int | None = None) -> None:
        super().__init__(count=count, current=current, chosen=[])

    def device_count(self) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return self.current is not None

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: Any) -> None:
        self.current = getattr(device, "index", device)
        self.chosen.append(self.current)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """Four CUDA devices, not initialised."""
    there = Accelerator(4)
    monkeypatch.setattr(torch, "cuda", there)
    return there


def choose(local_rank: int | None, asked: str | None = None, backend: str = "nccl") -> torch.device:
    """The choice of a rank for CUDA."""
    device = None if asked is None else torch.device(asked)
    return devices.choose_device("cuda", local_rank, asked=device, backend=backend)


def test_the_local_rank_chooses_the_device(cuda: Accelerator) -> None:
    """A rank takes the device of its local rank; choosing alone initialises nothing."""
    assert [choose(rank).index for rank in range(4)] == [0, 1, 2, 3]
    assert not cuda.is_initialized()


def test_the_only_visible_device_is_taken(cuda: Accelerator) -> None:
    """Where one device is visible it is taken, whatever the local rank."""
    cuda.count = 1
    assert [choose(rank) for rank in (0, 3, None)] == [torch.device("cuda", 0)] * 3


def test_the_device_that_is_asked_for_is_taken(cuda: Accelerator) -> None:
    """A device that is asked for beats the local rank; one without an index follows it."""
    assert choose(0, "cuda:2") == torch.device("cuda", 2)
    assert choose(3, "cuda") == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("count", "local_rank", "asked", "says"),
    [
        (4, 4, None, "local rank 4, but torch sees 4 cuda devices here (0 to 3)"),
        (4, None, None, "local rank None, but torch sees 4 cuda devices"),
        (4, 0, "cuda:7", "torch sees 4 cuda devices"),
        (0, 0, None, "torch sees no such device on this host"),
        (4, 0, "cpu", "is not of device_type='cuda'"),
    ],
)
def test_a_device_that_is_not_there(
    cuda: Accelerator, count: int, local_rank: int | None, asked: str | None, says: str
) -> None:
    """A device that is not there is refused with what there is."""
    cuda.count = count
    with pytest.raises(LaunchEnvironmentError) as caught:
        choose(local_rank, asked)
    assert says in str(caught.value)


def test_the_device_is_put_back(cuda: Accelerator) -> None:
    """The device that was current before is current again; where none was, nothing is put back."""
    with devices.use_device(torch.device("cuda", 2)):
        assert cuda.current == 2
    assert cuda.chosen == [2]
    cuda.current = 1
    with devices.use_device(torch.device("cuda", 3)):
        assert cuda.current == 3
    assert cuda.current == 1


def test_nothing_is_touched_on_the_cpu(cuda: Accelerator) -> None:
    """A world on the CPU touches no accelerator."""
    with devices.use_device(devices.choose_device("cpu", 3, asked=None, backend="gloo")):
        pass
    assert cuda.chosen == []


@pytest.mark.parametrize(
    ("backend", "device", "binds"),
    [
        ("nccl", "cuda:1", True),
        ("cpu:gloo,cuda:nccl", "cuda:1", True),
        ("gloo", "cuda:1", False),
        ("gloo", "cpu", False),
        ("fake", "cuda:1", False),
    ],
)
def test_which_groups_bind_their_device(backend: str, device: str, binds: bool) -> None:
    """device_id is passed just where an accelerator has the backend that is made for it."""
    assert devices.binds_device(backend, torch.device(device)) == binds


@pytest.mark.parametrize(
    ("backend", "device_type"),
    [
        ("gloo", "cpu"),
        ("nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("cpu:gloo", "cpu"),
        ("fake", "cpu"),
        ("mpi", "cpu"),
    ],
)
def test_the_device_type_follows_the_backend(backend: str, device_type: str) -> None:
    """The type of device follows the backend, its accelerator where it has one."""
    assert devices.device_type_of(backend) == device_type


def test_the_backend_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend comes from torch's own map, also for a device type that a plug-in registered."""
    assert devices.default_backend("cuda") == "nccl"
    assert devices.default_backend("cpu") == "gloo"
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "npu", "hccl")
    assert devices.default_backend("npu") == "hccl"
    assert devices.device_type_of("hccl") == "npu"


@pytest.mark.parametrize(
    ("wanted", "got", "same"),
    [
        ("gloo", "gloo", True),
        ("GLOO", "gloo", True),
        ("gloo", "nccl", False),
        ("nccl", "cpu:gloo,cuda:nccl", True),
        ("cuda:nccl", "cpu:gloo,cuda:nccl", True),
        ("cpu:gloo,cuda:nccl", "cpu:gloo", False),
        ("cpu:gloo", "gloo", True),
        ("cpu:gloo,cuda:nccl", "gloo", False),
    ],
)
def test_when_a_group_has_the_backend_that_was_asked_for(wanted: str, got: str, same: bool) -> None:
    """A group is what was asked for where it has that backend for every device that was named."""
    assert devices.same_backend(wanted, got) == same


def test_gloo_is_told_that_the_store_can_tell_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the block only, and for as long as the group may wait, not the store; then all is as it
    was, after an error too."""
    name = "GLOO_ENABLE_STORE_V2_API"
    monkeypatch.delenv(name, raising=False)
    store, before, within = dist.HashStore(), timedelta(seconds=77), timedelta(seconds=5)
    store.set_timeout(before)

    def build() -> None:
        with devices.gloo_reads_at_once(store, within):
            assert (os.environ[name], store.timeout) == ("1", within)
            raise KeyError

    with pytest.raises(KeyError):
        build()
    assert name not in os.environ
    assert store.timeout == before


def test_who_decided_how_gloo_reads_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set stays as it is."""
    monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", "0")
    with devices.gloo_reads_at_once(None, timedelta(seconds=5)):
        assert os.environ["GLOO_ENABLE_STORE_V2_API"] == "0"
    assert os.environ["GLOO_ENABLE_STORE_V2_API"] == "0"


@pytest.mark.parametrize("at_once", ["0", None])
def test_gloo_reads_its_ranks_in_one_go(
    at_once: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real group asks the store once for all, where it is told so, and one by one where not."""
    if at_once is None:
        monkeypatch.delenv("GLOO_ENABLE_STORE_V2_API", raising=False)
    else:
        monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", at_once)
    store = counting_store(dist.HashStore())
    with DistributedRuntime("gloo", store=store, rank=0, world_size=1) as rt:
        assert rt.world_size == 1
    asked = list(Counter({name: store.calls[name] for name in ("get", "multi_get")}).elements())
    assert asked == (["multi_get"] if at_once is None else ["get"])
