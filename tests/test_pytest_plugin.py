"""The pytest plugin: marker, fixtures, how ranks start, what they may not leave behind."""

from __future__ import annotations

import re

import pytest

from launch import HERE


def test_a_run_that_does_not_use_it_loads_nothing(pytester, suite):
    """Neither torch nor the rest of distctx is imported; markers and fixtures are documented."""
    pytester.makepyfile(
        test_plain="""
        import sys

        def test_nothing_is_loaded():
            ours = ("distctx", "torch", "attr")
            loaded = {name for name in sys.modules if name.split(".")[0] in ours}
            assert loaded == {"distctx", "distctx.pytest_plugin", "distctx.testing"}
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=1)
    markers = pytester.runpytest_subprocess("--markers")
    markers.stdout.fnmatch_lines(["@pytest.mark.distributed(world_size*"])
    fixtures = pytester.runpytest_subprocess("--fixtures")
    for name in ("distributed_runtime", "make_distributed_runtime", "shared_tmp_path"):
        fixtures.stdout.re_match_lines([rf"{name} -- .*"], consecutive=False)


def test_what_an_ordinary_test_can_do_a_test_of_many_ranks_can(pytester, suite):
    """Fixtures, conftest, closures, parameters, output, logs, skips, xfails, temporary folders."""
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(scope="session")
        def from_conftest():
            return lambda: "not picklable"
        """
    )
    run = suite(
        """
import logging

made = object()

@pytest.fixture(scope="module")
def helper():
    yield lambda: made

@pytest.fixture(params=[lambda x: x + 1, lambda x: x - 1], ids=["up", "down"])
def change(request):
    return request.param

@pytest.mark.distributed(world_size=[2, 4], mesh_shape=(-1, 2), mesh_dim_names=("dp", "tp"))
class TestMany:
    @pytest.mark.parametrize("number", [1, 2])
    def test_parameters(self, distributed_runtime, change, number, helper, from_conftest):
        assert helper() is made and from_conftest() == "not picklable"
        total = torch.tensor([change(number)])
        dist.all_reduce(total)
        assert total.item() == change(number) * distributed_runtime.world_size
        assert distributed_runtime.tp_size == 2

@pytest.mark.distributed(2)
def test_output(distributed_runtime, capsys, caplog, monkeypatch):
    monkeypatch.setenv("CHANGED", "1")
    print("said by", distributed_runtime.rank)
    logging.getLogger("mine").warning("logged")
    assert capsys.readouterr().out == f"said by {distributed_runtime.rank}\\n"
    assert "logged" in [record.getMessage() for record in caplog.records]

@pytest.mark.distributed(2)
def test_folders(distributed_runtime, tmp_path, shared_tmp_path):
    (shared_tmp_path / str(distributed_runtime.rank)).write_text(str(tmp_path))
    dist.barrier()
    paths = {path.read_text() for path in shared_tmp_path.iterdir()}
    assert len(paths) == 2 and f"rank-{distributed_runtime.rank}" in str(tmp_path)

@pytest.mark.distributed(2)
@pytest.mark.xfail(reason="known")
def test_xfail(distributed_runtime):
    if distributed_runtime.rank == 1:
        raise KeyError
    dist.barrier()

@pytest.mark.distributed(2)
@pytest.mark.xfail(strict=True, reason="known")
def test_xpass_strict(distributed_runtime):
    pass

@pytest.mark.distributed(2)
@pytest.mark.skip(reason="not here")
def test_skip_mark(distributed_runtime):
    assert 0

@pytest.mark.distributed(2)
def test_skip_inside(distributed_runtime):
    pytest.skip("not here either")

@pytest.mark.distributed(2)
def test_made(make_distributed_runtime):
    first = make_distributed_runtime(mesh_shape=(2, 1))
    assert not first.state.value == "open"
    with first:
        dist.barrier()
    make_distributed_runtime().open()  # closed afterwards

@pytest.mark.distributed(mesh_shape=(2, 1))
def test_size_from_shape(distributed_runtime):
    assert distributed_runtime.world_size == 2

def test_alone(distributed_runtime):
    assert distributed_runtime.world_size == 1 and dist.get_world_size() == 1

def test_no_group_is_left():
    assert not dist.is_initialized()

@pytest.mark.distributed(
    65536, backend="fake", rank=[0, 54321], mesh_shape=(-1, 8), mesh_dim_names=("dp", "tp")
)
def test_simulated(distributed_runtime):
    assert distributed_runtime.coordinate == divmod(distributed_runtime.rank, 8)

@pytest.mark.distributed(2)
def test_rewritten_assert(distributed_runtime):
    assert [1, distributed_runtime.rank] == [1, 5]
""",
        "-rA",
    )
    assert run.outcomes == {"passed": 16, "failed": 2, "skipped": 2, "xfailed": 1}, run.text
    assert "XPASS(strict)" in run.about("test_xpass_strict")
    assert re.search(r"At index 1 diff: [01] != 5", run.about("test_rewritten_assert"))
    for named in (
        "test_parameters[up-world_size=2-1]",
        "test_simulated[world_size=65536-rank=54321]",
    ):
        assert named in run.text
    assert "not here either" in run.text


def test_a_project_downstream(pytester, suite):
    """A project that knows only the installed plugin tests its code on 2 and 4 ranks."""
    for path in (HERE / "downstream").glob("*.py"):
        pytester.makepyfile(**{path.stem: path.read_text()})
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=8)


def test_world_sizes_can_be_selected(suite):
    """-k takes a world size as it stands in the ids, and only that one."""
    run = suite(
        """
@pytest.mark.distributed(world_size=[1, 2, 22])
def test_sizes(): pass
""",
        "-k",
        "world_size=2",
        "-v",
    )
    assert run.outcomes == {"passed": 1, "deselected": 2}
    assert "test_sizes[world_size=2] PASSED" in run.text


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("()", "say world_size="),
        ("(0)", "world_size=0"),
        ("(-1)", "world_size=-1: wanted a whole number"),
        ("([2, 2])", "has a number twice"),
        ("(world_size=[2, 3], mesh_shape=(-1, 2))", "mesh_shape"),
        ("(2, mesh='x')", "it does not take mesh; it takes world_size"),
        ("(2, rank=1)", 'needs backend="fake"'),
        ("(2, rank=2, backend='fake')", "rank=2 is not in a world of 2"),
        ("(2, timeout='1')", "timeout='1': wanted seconds"),
    ],
)
def test_a_wrong_marker_is_an_error_of_collection(pytester, mark, said):
    """Before any rank starts, and it says what was wanted."""
    pytester.makepyfile(f"import pytest\n@pytest.mark.distributed{mark}\ndef test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider")
    assert result.parseoutcomes() in ({"error": 1}, {"errors": 1})
    assert said in str(result.stdout)


STARTS = """
HERE = os.getpid()
OMP = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}

def listening():
    own = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd")
           if os.path.exists(f"/proc/self/fd/{fd}")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{table}").readlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[9]) in own:
                found.append(words[1].split(":")[0])
    return found

@pytest.mark.distributed(3)
def test_start(distributed_runtime, shared_tmp_path):
    assert OMP == {"RANK": None, "WORLD_SIZE": None}  # the suite was not collected in a rank
    assert os.environ["RANK"] == str(distributed_runtime.rank)
    assert torch.get_num_threads() == 1
    places = listening()
    assert places and set(places) == {"0100007F"}, places
    print("collected by", HERE, "parent", os.getppid())
    dist.barrier()

@pytest.mark.distributed(2)
def test_torch_itself():
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()

def test_here():
    print("suite is", os.getpid())
"""


def test_ranks_are_forked_from_what_was_collected(suite):
    """One process forks all ranks of all tests; no port, loopback only, one thread."""
    run = suite(STARTS, "-rA")
    assert run.outcomes == {"passed": 3}, run.text
    here = re.search(r"suite is (\d+)", run.text)[1]
    collected = set(re.findall(r"collected by (\d+) parent (\d+)", run.text))
    assert len(collected) == 1
    assert collected.pop()[0] == here
    assert "distctx: each rank" not in run.text


@pytest.mark.parametrize(
    ("unclean", "said"),
    [
        ("threading.Thread(target=time.sleep, args=(1000,), daemon=True, name='of-mine').start()",
         "this process has other threads: of-mine"),
        ("dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
         "this process has a process group"),
        ("STORE = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)",
         "this process has other threads: pt_tcpstore"),
        ("", "asked for"),
    ],
)  # fmt: skip
def test_where_a_fork_is_not_clean_a_rank_is_a_fresh_process(suite, unclean, said):
    """It collects again, the run says so and why, and the reports are the same."""
    run = suite(
        f"""
{unclean}

@pytest.mark.distributed(2)
def test_assert():
    print("rank", os.environ["RANK"])
    assert os.environ["RANK"] == "0"

@pytest.mark.distributed(2)
def test_kill():
    os.kill(os.getpid(), signal.SIGKILL)
""",
        *([] if unclean else ["--distributed-fresh"]),
    )
    assert f"distctx: each rank is a fresh process that collects again ({said}" in run.text
    assert run.outcomes == {"failed": 2}
    assert run.about("test_assert").strip().startswith("Rank 1 of 2 failed first, in call")
    assert "Captured stdout call, rank 1" in run.about("test_assert")
    assert "killed by SIGKILL" in run.row("test_kill", 0)


def test_a_parent_that_computed_in_many_threads_can_fork(suite):
    """Its children compute in one thread, so that they wait for none they do not have."""
    run = suite(
        """
torch.set_num_threads(4)
(torch.randn(4_000_000) * 2).sum()
torch.randn(500, 500) @ torch.randn(500, 500)

@pytest.mark.distributed(2, timeout=20)
@pytest.mark.parametrize("again", range(3))
def test_compute(distributed_runtime, again):
    torch.randn(2_000_000).sort()
    layer = torch.nn.Conv2d(3, 8, 3)
    layer(torch.randn(4, 3, 64, 64)).sum().backward()
    dist.all_reduce(layer.weight.grad)
"""
    )
    assert run.outcomes == {"passed": 3}, run.text


def test_torch_checks_every_collective(suite):
    """A wrong shape on one rank is an error on all four; without the checks it may pass."""
    run = suite(
        """
@pytest.mark.distributed(4)
def test_on(distributed_runtime):
    assert os.environ["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    with pytest.raises(RuntimeError, match="mismatch between collectives"):
        dist.all_reduce(torch.ones(2 if distributed_runtime.rank == 1 else 1))

@pytest.mark.distributed(4, detail=False)
def test_off(distributed_runtime):
    assert dist.get_debug_level() == dist.DebugLevel.OFF
"""
    )
    assert run.outcomes == {"passed": 2}, run.text


def test_what_a_test_leaves_behind_fails_it(suite):
    """A group, a variable, a hook, a thread, a child; each is named, and ends with its rank."""
    run = suite(
        """
import subprocess

def start():
    dist.init_process_group("gloo")

def sleeper(**kind):
    return subprocess.Popen(["sleep", "1000"], **kind)

LEAVE = dict(
    group=start,
    variable=lambda: os.environ.update(LEFT="here"),
    no_variable=lambda: os.environ.pop("PATH"),
    hook=lambda: setattr(sys, "excepthook", print),
    thread=lambda: threading.Thread(
        target=time.sleep, args=(1000,), daemon=True, name="mine").start(),
    child=sleeper,
    session=lambda: sleeper(start_new_session=True),
)

@pytest.mark.distributed(2)
@pytest.mark.parametrize("what", LEAVE)
def test_left(what):
    LEAVE[what]()

@pytest.mark.distributed(2, guards=False)
@pytest.mark.parametrize("what", [what for what in LEAVE if what != "group"])
def test_allowed(what):
    LEAVE[what]()

@pytest.mark.distributed(2)
def test_helpers_that_last_are_no_left_overs(distributed_runtime):
    from multiprocessing import shared_memory
    piece = shared_memory.SharedMemory(create=True, size=10)
    piece.close()
    piece.unlink()

def test_alone(distributed_runtime):
    distributed_runtime.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_after():
    assert not dist.is_initialized()
"""
    )
    assert run.outcomes == {"failed": 7, "passed": 9, "errors": 1} or run.outcomes == {
        "failed": 7, "passed": 9, "error": 1}, run.text  # fmt: skip
    for what, said in {
        "group": "a process group (gloo, 2 ranks)",
        "variable": "the environment variable LEFT='here'",
        "no_variable": "no environment variable PATH, which was there",
        "hook": "another sys.excepthook",
        "thread": "a thread, 'mine'",
        "child": "(sleep 1000)",
        "session": "(sleep 1000)",
    }.items():
        report = run.about(f"test_left[world_size=2-{what}]")
        assert "of 2 left behind: " in report
        assert said in report, report
    assert "the test left behind: a process group" in run.about("test_alone")


def test_backends(suite):
    """nccl is skipped where GPUs are missing, auto takes what is there, gloo needs nothing."""
    run = suite(
        """
@pytest.mark.distributed(4, backend="nccl")
def test_nccl(distributed_runtime):
    pass

@pytest.mark.distributed(2, backend="auto")
def test_auto(distributed_runtime):
    expected = "nccl" if torch.cuda.device_count() >= 2 else "gloo"
    assert distributed_runtime.backend == expected

@pytest.mark.distributed(2, backend="nccl")
def test_without_fixture():
    pass
""",
        "-rs",
    )
    import torch

    have = torch.cuda.device_count()
    if have < 2:
        assert run.outcomes == {"passed": 1, "skipped": 2}, run.text
        assert f"needs 4 GPUs, have {have}" in run.text
        assert f"needs 2 GPUs, have {have}" in run.text


def test_warnings_and_exits_of_ranks_reach_the_run(suite):
    """A warning is listed once; pytest.exit on one rank ends the run."""
    run = suite(
        """
import warnings

class Mine(UserWarning):
    pass

@pytest.mark.distributed(2)
def test_warns():
    warnings.warn("mind this", Mine)

@pytest.mark.distributed(2)
def test_exits():
    if os.environ["RANK"] == "1":
        pytest.exit("enough")
    time.sleep(1000)

def test_never(): pass
"""
    )
    assert run.text.count("Mine: mind this") == 1
    assert run.outcomes == {"passed": 1}
    assert "Exit: enough" in run.text


def test_pytest_ends_what_it_set_up_itself(suite):
    """Fixtures of this process end when no test to come uses them, with a ranks' test between."""
    run = suite(
        """
@pytest.fixture(scope="class")
def held():
    yield 1
    print("held has ended")

class TestFirst:
    def test_here(self, held): pass

    @pytest.mark.distributed(2)
    def test_ranks(self): pass

def test_last():
    print("last")
""",
        "-s",
    )
    assert run.outcomes == {"passed": 3}
    assert run.text.index("held has ended") < run.text.index("last\n")


def test_subtests_are_those_of_one_rank(suite):
    """What a test reports of its parts is counted once, with its description."""
    pytest.importorskip("_pytest.subtests", reason="needs a pytest that has subtests")
    run = suite(
        """
@pytest.mark.distributed(2)
def test_parts(subtests, distributed_runtime):
    for part in range(3):
        with subtests.test(part=part):
            assert part != 1
"""
    )
    assert run.outcomes == {"failed": 2}, run.text
    assert run.text.count("SUBFAILED(part='1')") == 1
    assert "contains 1 failed subtest" in run.text


def test_the_time_of_a_test_is_a_setting(suite, pytester):
    """Where the marker does not say."""
    pytester.makeini("[pytest]\ndistributed_timeout = 0.5")
    run = suite(
        """
@pytest.mark.distributed(2)
def test_stuck():
    time.sleep(1000)
"""
    )
    assert "the test's 0.5 s were over" in run.about("test_stuck")
    pytester.makeini("[pytest]\ndistributed_timeout = soon")
    wrong = suite("@pytest.mark.distributed(2)\ndef test_it(): pass")
    assert "distributed_timeout = soon: wanted seconds" in wrong.text


def test_two_that_blame_each_other_are_no_consequence(suite):
    """Only where some rank failed by itself, or left, is another's failure a consequence."""
    run = suite(
        """
@pytest.mark.distributed(2)
def test_both():
    raise RuntimeError("connection refused by a server of mine")
"""
    )
    assert "a consequence" not in run.about("test_both")
