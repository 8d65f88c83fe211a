"""``python -m distctx``: what it prints, and what it exits with."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

from distctx import MeshLayout, check, picture
from distctx.__main__ import main
from launch import clean_environment, run, torchrun


def last_line(text: str) -> str:
    """The one line of an error, and that it is one."""
    (line,) = text.strip().splitlines()
    return line


def test_check_of_a_world_of_one() -> None:
    """Without a launcher check opens a world of 1, checks it, and exits with 0."""
    done = run("-m", "distctx", "check", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["world_size"] == 1
    assert [row["rank"] for row in report["ranks"]] == [0]


def test_check_starts_ranks_with_their_coordinates() -> None:
    """--nproc 4 prints four ranks with their right coordinates, and every dim was checked."""
    done = run("-m", "distctx", "check", "--nproc", "4", "--mesh", "dp=2,tp=-1", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["mesh"] == {"dp": 2, "tp": 2}
    assert [row["coordinate"] for row in report["ranks"]] == [
        {"dp": 0, "tp": 0},
        {"dp": 0, "tp": 1},
        {"dp": 1, "tp": 0},
        {"dp": 1, "tp": 1},
    ]
    assert [row["dp_partition"] for row in report["ranks"]] == [[2, 0], [2, 0], [2, 1], [2, 1]]
    assert len({row["pid"] for row in report["ranks"]}) == 4
    assert {row["host"] for row in report["ranks"]} == {socket.gethostname()}
    assert all(one["ok"] and one["seconds"] > 0 for one in report["checks"])
    assert [one["name"].partition(":")[0] for one in report["checks"]][-2:] == ["dp", "tp"]


def test_check_under_torchrun_uses_that_world() -> None:
    """Under torchrun check is that world, and only the main rank prints."""
    done = run(*torchrun("-m", "distctx", "check", "--json", nproc=2))
    assert done.returncode == 0, done.stderr
    report = json.loads(last_line(done.stdout))
    assert [row["coordinate"] for row in report["ranks"]] == [{"dp": 0}, {"dp": 1}]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--nproc", "4", "--mesh", "dp=3,tp=2"], 2, "mesh_shape=(3, 2) uses 6 ranks"),
        (["--mesh", "dp=2"], 2, "start 2 ranks"),
        (["--backend", "glooo"], 2, "available: gloo"),
        (["--nproc", "2", "--backend", "glooo"], 2, "available: gloo"),
        (["--backend", "fake"], 2, "computes nothing"),
    ],
)
def test_check_that_cannot_be_is_one_line(arguments: list[str], status: int, says: str) -> None:
    """What cannot be checked exits with its status, and one line that says what to do."""
    done = run("-m", "distctx", "check", *arguments)
    assert done.returncode == status, done.stderr
    assert says in last_line(done.stderr)
    assert done.stdout == ""


def test_ranks_that_do_not_meet_exit_with_three() -> None:
    """A rank whose peers do not come exits with 3, in one line that names them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = run("-m", "distctx", "check", "--timeout", "0.5", environ=launch)
    assert done.returncode == 3, done.stderr
    assert "rank 1 absent" in last_line(done.stderr)


def test_half_a_launch_exits_with_two() -> None:
    """A launch that is partly set exits with 2, and names what is set and what lacks."""
    done = run("-m", "distctx", "check", environ={"RANK": "0"})
    assert done.returncode == 2
    assert "RANK=0 is set, but WORLD_SIZE" in last_line(done.stderr)


def test_nproc_inside_a_launch_is_refused() -> None:
    """--nproc under a launcher is refused: that one has started the ranks."""
    launch = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    done = run("-m", "distctx", "check", "--nproc", "2", environ=launch)
    assert done.returncode == 2
    assert "leave --nproc out" in last_line(done.stderr)


def test_a_rank_that_fails_is_named() -> None:
    """Where a started rank fails, the status is its own, and one line names it and its error."""
    launch = {"GLOO_SOCKET_IFNAME": "no-such-interface"}
    done = run("-m", "distctx", "check", "--nproc", "2", "--timeout", "5", environ=launch)
    assert done.returncode == 3, done.stderr
    assert last_line(done.stderr).startswith("distctx check: rank ")
    assert "RendezvousError: All ranks met, but then" in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupted_check_ends_its_ranks() -> None:
    """Ctrl-C ends check and the ranks it started, with status 130."""
    command = [sys.executable, "-m", "distctx", "check", "--nproc", "2"]
    process = subprocess.Popen(
        command,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    end = time.monotonic() + 60
    pids: list[int] = []
    while not pids and time.monotonic() < end and process.poll() is None:
        with open(children) as file:
            pids = [int(pid) for pid in file.read().split()]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda tensor, **_: tensor.add_(7), "the sum is 8, not 1"),
        (lambda tensor, **_: tensor.zero_(), "the sum is 0, not 1"),
    ],
)
def test_a_wrong_sum_is_found(
    spoil: Any, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A collective that gives a wrong result is a FAIL with got and wanted, and exits with 1."""
    monkeypatch.setattr(dist, "all_reduce", spoil)
    assert main(["check"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed
    assert f"rank 0: {says}" in printed
    assert "something is wrong" in printed


def test_a_wrong_group_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dim whose group holds other ranks than the layout says is a FAIL."""
    monkeypatch.setattr(MeshLayout, "ranks", lambda self, rank, *dims: (41,))
    assert main(["check", "--mesh", "dp=1"]) == 1
    assert "the group holds (0,), not (41,)" in capsys.readouterr().out


def test_a_wrong_mesh_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mesh that is not the layout's is a FAIL."""
    coordinate = dist.device_mesh.DeviceMesh.get_coordinate
    monkeypatch.setattr(
        dist.device_mesh.DeviceMesh, "get_coordinate", lambda self: [9, *coordinate(self)[1:]]
    )
    assert main(["check"]) == 1
    assert "the mesh says ((1,), (9,), ('dp',))" in capsys.readouterr().out


def test_an_unforeseen_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that nobody foresaw exits with 1, in one line."""
    monkeypatch.setattr(check, "_check_world", lambda rt: 1 / 0)
    assert main(["check"]) == 1
    assert "ZeroDivisionError: division by zero" in last_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["layout", "--mesh", "dp"], "'dp' in 'dp' is not NAME=SIZE"),
        (["layout", "--mesh", "dp=2,dp=2"], "names must differ"),
        (["layout", "--mesh", "dp=0"], "every size must be at least 1"),
        (["layout", "--mesh", "dp=2", "--world-size", "0"], "at least 1, got '0'"),
        (["check", "--timeout", "soon"], "wanted seconds, more than 0, got 'soon'"),
        (["check", "--timeout", "inf"], "wanted seconds, more than 0, got 'inf'"),
        (["check", "--nproc", "-1"], "at least 1, got '-1'"),
        ([], "required: COMMAND"),
    ],
)
def test_arguments_that_cannot_be(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments that cannot be exit with 2 and say what was wanted."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "dp=-1"], "say --world-size"),
        (["--mesh", "dp=3", "--world-size", "4"], "uses 3 ranks, but world_size=4"),
        (["--mesh", "dp=3", "--rank", "3"], "rank=3 is outside"),
        (["--mesh", "dp=3", "--groups", "tp"], "its dims are dp"),
    ],
)
def test_layouts_that_cannot_be(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layout that cannot be exits with 2, in one line."""
    assert main(["layout", *arguments]) == 2
    assert says in last_line(capsys.readouterr().err)


def test_layout_and_env_do_not_import_torch() -> None:
    """layout and env work without torch, even where it cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from distctx.__main__ import main\n"
        "sys.exit(main(['layout', '--mesh', 'dp=2']) or main(['env']))"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "shape", [(8,), (2, 3), (2, 3, 4), (2, 2, 2, 2), (3, 1, 5), (1, 1), (64, 32, 8), (2, 2**19)]
)
@pytest.mark.parametrize("width", [40, 80])
def test_a_picture_fits_and_is_right(shape: tuple[int, ...], width: int) -> None:
    """Every rank shown stands at its coordinate, own and group are marked, and the lines fit."""
    names = ("pp", "dp", "cp", "tp")[-len(shape) :]
    layout = MeshLayout(shape, names)
    rank = layout.world_size // 2
    lines = str(picture.draw(layout, rank, names[:1], width, 40)).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 80
    assert f"[{rank}]" in "".join(lines[3:-2])
    head = lines[2]
    columns = head.replace(f"{names[-1]}=", " ").split()
    outer: dict[str, int] = {}
    shown = set()
    end = next(i for i, line in enumerate(lines) if line.startswith(f"[{rank}] rank"))
    for line in lines[lines.index(head) + 1 : end]:
        cells = line.split()
        if len(shape) > 2 and "=" in line and len(cells) == len(shape) - 2:
            outer = {k: int(v) for k, v in (one.strip(",").split("=") for one in cells)}
        elif cells and cells[0] != "…":
            row = {}
            if len(shape) > 1:
                name, _, index = cells.pop(0).partition("=")
                row = {name: int(index)}
            for column, cell in zip(columns, cells, strict=True):
                if cell == "…":
                    continue
                number = int(cell.strip("[]()"))
                at = [(outer | row | {names[-1]: int(column)})[name] for name in names]
                assert layout.rank(at) == number
                assert cell.startswith("[") == (number == rank)
                mine = number in layout.ranks(rank, names[0]) and number != rank
                assert cell.startswith("(") == mine
                shown.add(number)
    if layout.world_size <= 24:
        assert shown == set(range(layout.world_size))


def test_a_million_ranks_cost_what_is_shown() -> None:
    """Drawing a layout asks for the coordinates of what is shown, not of the world."""
    asked = 0
    coordinate = MeshLayout.coordinate

    def counted(self: MeshLayout, rank: int) -> tuple[int, ...]:
        nonlocal asked
        asked += 1
        return coordinate(self, rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshLayout, "coordinate", counted)
        picture.draw(MeshLayout((2**10, 2**5, 2**5), ("pp", "dp", "tp")), 12345, ("dp",))
    assert asked < 2000


def test_groups_are_listed_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    """--groups lists the groups along one or several dims, elided."""
    assert main(["layout", "--mesh", "pp=2,dp=4,tp=8", "--groups", "dp,tp"]) == 0
    printed = capsys.readouterr().out
    assert "dp, tp groups: 2 of 32 ranks" in printed
    assert "  0, 1, 2, 3, 4, 5, …, 31\n  32, 33, 34, 35, 36, 37, …, 63" in printed


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("room", [1, 3, 5])
def test_elided_things_keep_first_and_last(number: int, room: int) -> None:
    """What is left out stands between the first ones and the last."""
    shown = picture.elide(number, room)
    kept = [i for i in shown if i is not None]
    assert kept == sorted(set(kept))
    assert (None in shown) == (len(kept) < number)
    if number:
        assert (kept[0], kept[-1]) == (0, number - 1)
    assert len(shown) <= max(room, 3)


def test_env_as_json() -> None:
    """env --json gives values, sources, reason and the variables that are set."""
    done = run("-m", "distctx", "env", "--json", environ={"MASTER_ADDR": "h"})
    report = json.loads(done.stdout)
    assert report["values"]["world_size"] == 1
    assert report["sources"]["rank"] == "no launcher"
    assert report["reason"].startswith("MASTER_ADDR=h is set")
    assert report["variables"] == {"MASTER_ADDR": "h"}


def test_env_of_half_a_launch_shows_all_that_is_set() -> None:
    """Where the launch is not right, env exits with 2 and shows what is wrong and what is set."""
    done = run("-m", "distctx", "env", environ={"RANK": "1", "MASTER_PORT": "7"})
    assert done.returncode == 2
    assert "RANK=1 is set, but WORLD_SIZE" in done.stderr
    assert "  RANK=1" in done.stdout
    assert "  MASTER_PORT=7" in done.stdout


def test_the_reader_may_go_away() -> None:
    """A reader that closes the pipe is no traceback."""
    command = f"{sys.executable} -m distctx layout --mesh dp=100000 --groups dp | true"
    done = subprocess.run(
        command, shell=True, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr


def test_a_size_is_a_product() -> None:
    """The size in the title is the product of the sizes."""
    assert f"{math.prod((3, 5, 7))} ranks" in str(picture.draw(MeshLayout((3, 5, 7))))


def test_without_stdout_nothing_is_printed() -> None:
    """With stdout closed the commands do their work, and exit as they would."""
    for command in ("check", "env", "layout --mesh dp=2"):
        line = f"{sys.executable} -m distctx {command} >&-"
        done = subprocess.run(
            line, shell=True, env=clean_environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
