"""The pytest plugin: what it says of a test that failed, and that nothing hangs or stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from suites import IMPORTS, SLACK, processes_of

FAILING = """
@pytest.mark.distributed(4)
def test_assert(distributed_runtime):
    print("output of", distributed_runtime.rank)
    if distributed_runtime.rank == 2:
        wanted = 3
        assert distributed_runtime.rank == wanted
    dist.barrier()

@pytest.mark.distributed(4)
def test_sigkill(distributed_runtime):
    if distributed_runtime.rank == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.distributed(4)
def test_segv(distributed_runtime):
    if distributed_runtime.rank == 1:
        import ctypes
        ctypes.string_at(0)
    dist.barrier()

@pytest.mark.distributed(2)
def test_exit(distributed_runtime):
    if distributed_runtime.rank == 1:
        os._exit(3)
    dist.barrier()

@pytest.mark.distributed(4, timeout=2)
def test_asleep(distributed_runtime):
    if distributed_runtime.rank == 3:
        time.sleep(1000)
    dist.barrier()

@pytest.mark.distributed(2)
def test_grace(distributed_runtime):
    if distributed_runtime.rank == 0:
        raise KeyError("the first")
    time.sleep(1000)

@pytest.fixture
def bad_setup(distributed_runtime):
    assert distributed_runtime.rank != 1, "no setup here"

@pytest.mark.distributed(2)
def test_setup(bad_setup):
    dist.barrier()

@pytest.fixture
def bad_teardown(distributed_runtime):
    yield
    assert distributed_runtime.rank != 1, "no teardown here"

@pytest.mark.distributed(2)
def test_teardown(bad_teardown):
    dist.barrier()

@pytest.mark.distributed(3)
def test_disagree(distributed_runtime):
    if distributed_runtime.rank == 1:
        pytest.skip("only here")

@pytest.mark.distributed(4)
def test_fold():
    raise ValueError("all alike")

@pytest.mark.distributed(2)
def test_two_places():
    if os.environ["RANK"] == "0":
        raise ValueError("one place")
    raise TypeError("another place")

@pytest.mark.distributed(2)
def test_after_all(distributed_runtime):
    dist.barrier()
"""


def test_the_report_names_the_culprit(suite):
    """First the rank that failed first, then a table of all; crashes and hangs end, with stacks."""
    start = time.monotonic()
    run = suite(FAILING)
    took = time.monotonic() - start
    assert run.outcomes == {"passed": 2, "failed": 9, "errors": 2}, run.text

    report = run.about("test_assert")
    assert report.strip().startswith("Rank 2 of 4 failed first, in call after 0.")
    assert re.search(r"^E +assert 2 == 3$", report, re.MULTILINE)
    assert run.row("test_assert", 0).startswith("rank 2")
    assert all("a consequence" in run.row("test_assert", n) for n in (1, 2))
    assert "Captured stdout call, rank 3" in report
    assert "output of 3" in report
    assert "python -m pytest 'test_it.py::test_assert[world_size=4]'" in report
    assert "FAILED test_it.py::test_assert[world_size=4] - rank 2: assert 2 == 3" in run.text

    report = run.about("test_sigkill")
    assert report.strip().startswith("Rank 1 of 4 killed by SIGKILL, in call after ")
    assert re.search(r"Captured stdout until it ended, rank 1 -+\nlast words", report)
    assert run.row("test_sigkill", 0).startswith("rank 1 ")

    report = run.about("test_segv")
    assert report.strip().startswith("Rank 1 of 4 killed by SIGSEGV (segmentation fault), in call")
    assert "ctypes.string_at(0)" in report
    assert "in string_at" in report

    assert "Rank 1 of 2 exited with status 3 in the middle of the test" in run.about("test_exit")

    report = run.about("test_asleep")
    assert report.strip().startswith("Rank 3 of 4 did not end, in call: the test's 2 s were over")
    assert "time.sleep(1000)" in run.row("test_asleep", 0)
    assert "dist.barrier()" in run.row("test_asleep", 1)
    assert "ranks 0, 1, 2" in run.row("test_asleep", 1)
    assert "where ranks 0, 1, 2 stood" in report

    report = run.about("test_grace")
    assert report.strip().startswith("Rank 0 of 2 failed first")
    assert "1 s after rank 0 had failed" in run.row("test_grace", 1)
    assert "time.sleep(1000)" in run.row("test_grace", 1)

    assert run.about("test_setup").strip().startswith("Rank 1 of 2 failed first, in setup")
    assert "ERROR at setup of test_setup" in run.text
    assert run.about("test_teardown").strip().startswith("Rank 1 of 2 failed first, in teardown")
    assert "ERROR at teardown of test_teardown" in run.text

    assert "The ranks disagree: ranks 0, 2 passed, rank 1 skipped." in run.about("test_disagree")
    assert "only here" in run.row("test_disagree", 1)
    assert run.row("test_fold", 0).startswith("ranks 0, 1, 2, 3")
    report = run.about("test_two_places")
    assert "one place" in report
    assert "failed too" in report
    assert "another place" in report
    assert took < 40 + SLACK


def test_a_verdict_comes_soon_after_the_first_failure(suite):
    """One rank asserts while the others wait in a barrier: over in about a second."""
    run = suite(
        """
@pytest.mark.distributed(4, timeout=60)
@pytest.mark.parametrize("detail", [0, 1])
def test_assert(make_distributed_runtime, detail):
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG") if not detail else None
    dist.set_debug_level_from_env()
    with make_distributed_runtime() as rt:
        assert rt.rank != 2
        dist.barrier()
"""
    )
    assert run.outcomes == {"failed": 2}
    for detail in (0, 1):
        rows = [run.row(f"test_assert[world_size=4-{detail}]", n) for n in range(2)]
        latest = max(float(time) for row in rows for time in re.findall(r"(\d+\.\d\d) s ", row))
        assert latest < 2 + SLACK


@pytest.mark.timeout(300)
def test_200_failing_tests_leave_no_process(suite):
    """Of every kind: raise, assert, crash, kill, exit, hang, children, groups, threads."""
    run = suite(
        """
import subprocess

def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, set(range(1, 65)))
    time.sleep(1000)

QUICK = [
    lambda: 1 / 0,
    lambda: os.kill(os.getpid(), signal.SIGKILL),
    lambda: os.abort(),
    lambda: os._exit(0),
    lambda: sys.exit(1),
    lambda: (subprocess.Popen(["sleep", "1000"], start_new_session=True), 1 / 0),
    lambda: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start() or 1 / 0,
]
STUCK = [
    lambda: time.sleep(1000),
    deaf,
    lambda: os.kill(os.getpid(), signal.SIGSTOP),
    lambda: subprocess.run(["sh", "-c", "sleep 1000 & setsid sleep 1000 & exec sleep 1000"]),
]
KINDS = [kind for kind in QUICK for _ in range(26)] + [kind for kind in STUCK for _ in range(4)]
KINDS += [deaf, STUCK[0]]

@pytest.mark.distributed(2, timeout=0.5)
@pytest.mark.parametrize("number", range(200))
def test_fails(number):
    if os.environ["RANK"] == str(number % 2):
        KINDS[number]()
    else:
        time.sleep(0.05)
""",
        "-q",
        "--tb=no",
        "-p",
        "no:timeout",
    )
    assert run.outcomes == {"failed": 200}, run.text


def test_killing_pytest_leaves_no_process(suite, pytester):
    """SIGKILL of pytest, of the process that forks, in the middle of a test with children."""
    pytester.makepyfile(
        test_kill=IMPORTS
        + """
import subprocess

@pytest.mark.distributed(2)
def test_it(shared_tmp_path):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(os.environ["AT"] + os.environ["RANK"], "w").write(str(os.getppid()))
    time.sleep(1000)
"""
    )
    for victim in ("pytest", "pytest by SIGTERM", "zygote"):
        mark, at = uuid.uuid4().hex, pytester.path / victim.replace(" ", "-")
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:randomly", "test_kill.py"],
            env=os.environ | {"DISTCTX_MARK": mark, "AT": str(at)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        end = time.monotonic() + 60
        while time.monotonic() < end and not all(Path(f"{at}{r}").exists() for r in "01"):
            time.sleep(0.05)
        time.sleep(0.2)
        zygote = int(Path(f"{at}0").read_text())
        number = signal.SIGTERM if "SIGTERM" in victim else signal.SIGKILL
        os.kill(zygote if victim == "zygote" else process.pid, number)
        output, _ = process.communicate(timeout=30)
        if victim != "zygote":
            assert process.returncode == -number
            assert "INTERNALERROR" not in output
        else:
            assert "the process that forks ranks has ended" in output
        left = processes_of(mark)
        for line in left:
            os.kill(int(line.split(":")[0]), signal.SIGKILL)
        if victim != "zygote":
            assert left == []
        else:  # what a rank put into a session of its own is nobody's then; the ranks are gone
            assert all("sleep" in line for line in left)


def test_outcomes_are_not_lost_or_made_up(suite):
    """What a rank passes, fails or expects counts as it would in one process."""
    run = suite(
        """
RANK = lambda: int(os.environ["RANK"])

@pytest.mark.distributed(2)
@pytest.mark.xfail(reason="it is slow")
def test_xpass_later():
    time.sleep(2 * RANK())

@pytest.mark.distributed(2)
@pytest.mark.xfail(raises=ValueError, reason="known")
def test_another_error_is_no_xfail():
    raise KeyError("connection refused") if RANK() else ValueError("known")

@pytest.mark.distributed(2)
def test_a_child_that_comes_back_is_no_rank():
    if os.fork() == 0:
        return
    os.wait()
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.distributed(2)
def test_properties(record_property):
    record_property("shapes", {(2, 3): object()})

@pytest.mark.distributed(2)
def test_last_words():
    print("said before it left", flush=True)
    os._exit(0)

@pytest.mark.distributed(2)
def test_a_clock_of_its_own(monkeypatch):
    if RANK():
        time.sleep(0.3)
        monkeypatch.setattr(time, "monotonic", lambda: 0.0)
        raise ValueError("later")
    raise ValueError("first")

@pytest.mark.distributed(2)
def test_leaves_while_others_wait(distributed_runtime):
    if RANK() == 1:
        return
    dist.barrier()
"""
    )
    assert run.outcomes == {"xpassed": 1, "failed": 5, "passed": 1}, run.text
    assert "connection refused" in run.about("test_another_error_is_no_xfail")
    assert "killed by SIGKILL" in run.about("test_a_child_that_comes_back_is_no_rank")
    assert "exited with status 0 in the middle of the test" in run.about("test_last_words")
    assert "said before it left" in run.about("test_last_words")
    assert run.about("test_a_clock_of_its_own").strip().startswith("Rank 0 of 2 failed first")
    report = run.about("test_leaves_while_others_wait")
    assert report.strip().startswith("Rank 0 of 2 failed first, in call")
    assert "Rank 1 had ended before." in report
    assert "rank 1" in run.row("test_leaves_while_others_wait", 1)
    assert "passed" in run.row("test_leaves_while_others_wait", 1)


@pytest.mark.parametrize("capture", ["no", "sys", "tee-sys", "fd"])
def test_crashes_are_told_however_output_is_captured(suite, capture):
    """And what forks the ranks goes on."""
    run = suite(
        """
@pytest.mark.distributed(2)
def test_crash():
    if os.environ["RANK"] == "1":
        os.abort()

@pytest.mark.distributed(2)
def test_next(distributed_runtime):
    dist.barrier()
""",
        f"--capture={capture}",
    )
    assert run.outcomes == {"failed": 1, "passed": 1}, run.text
    assert run.about("test_crash").strip().startswith("Rank 1 of 2 killed by SIGABRT")
    assert "distctx: each rank" not in run.text


def test_an_exit_of_the_run_tells_what_failed_before(suite):
    """pytest.exit on a rank keeps its code, and the failure of another rank."""
    run = suite(
        """
@pytest.mark.distributed(2)
def test_it():
    assert os.environ["RANK"] != "1"
    time.sleep(0.5)
    pytest.exit("bye", returncode=7)

def test_never(): pass
"""
    )
    assert run.outcomes == {"failed": 1}, run.text
    assert "Exit: bye" in run.text
    assert run.result.ret == 7


def test_the_run_goes_on_without_what_forks(suite, pytester):
    """Where it was killed between tests, and where a file could not be collected."""
    pytester.makepyfile(test_broken="raise ValueError('no such suite')")
    run = suite(
        """
def test_kills():
    for child in open(f"/proc/self/task/{os.getpid()}/children").read().split():
        os.kill(int(child), signal.SIGKILL)

@pytest.mark.distributed(2)
def test_next(distributed_runtime):
    dist.barrier()
""",
        "--continue-on-collection-errors",
    )
    assert run.outcomes == {"passed": 2, "error": 1} or run.outcomes == {"passed": 2, "errors": 1}


def test_a_marker_that_comes_late(suite, pytester):
    """It may ask for one world size; for several it is an error of that test alone."""
    pytester.makeconftest(
        """
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                sizes = {"test_one_size": 2, "test_many_sizes": [1, 2]}.get(item.name)
                if sizes:
                    item.add_marker(pytest.mark.distributed(sizes))
        """
    )
    run = suite(
        """
def test_one_size(distributed_runtime):
    assert distributed_runtime.world_size == 2

def test_many_sizes(): pass

def test_other(): pass
"""
    )
    assert run.outcomes.pop("error", None) or run.outcomes.pop("errors", None)
    assert run.outcomes == {"passed": 2}
    assert "world_size=[1, 2]: one only" in run.about("test_many_sizes")
