"""The pytest plugin together with other plugins, with debuggers, and under a launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from distctx.debug import ranks_here
from launch import clean_environment, need, torchrun
from suites import IMPORTS, SLACK

MIXED = """
@pytest.mark.distributed(2)
@pytest.mark.parametrize("number", range(4))
def test_many(distributed_runtime, number):
    dist.barrier()
    assert number != 2

@pytest.mark.parametrize("number", range(4))
def test_one(number):
    assert number != 2
"""


def test_xdist_shares_the_processors_among_its_workers(suite):
    """Tests of two workers do not run at once where the machine has no processors for both."""
    need("xdist")
    run = suite(
        """
@pytest.mark.distributed(8)
@pytest.mark.parametrize("number", range(4))
def test_many(distributed_runtime, number, shared_tmp_path):
    start = time.time()
    dist.barrier()
    time.sleep(0.3)
    dist.barrier()
    if distributed_runtime.rank == 0:
        with open(os.environ["AT"], "a") as file:
            file.write(f"{start} {time.time()} {os.getppid()}\\n")
    assert number != 2

def test_one():
    time.sleep(0.1)
""",
        "-n2",
    )
    assert run.outcomes == {"passed": 4, "failed": 1}, run.text
    assert run.about("test_many[world_size=8-2]").count("assert 2 != 2")
    lines = [line.split() for line in Path(os.environ["AT"]).read_text().splitlines()]
    assert len({parent for _, _, parent in lines}) == 2  # both workers had some
    spans = sorted((float(start), float(end)) for start, end, _ in lines)
    if len(os.sched_getaffinity(0)) <= 8:
        assert all(spans[i][1] <= spans[i + 1][0] for i in range(3)), spans


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    """A file that inner suites may write to."""
    monkeypatch.setenv("AT", str(tmp_path / "at"))


def test_pytest_timeout_guards_from_outside(suite):
    """It ends a test of many ranks, whose report still says where each stood; the next one runs."""
    run = suite(
        """
@pytest.mark.distributed(2)
def test_that_waits_until_all_is_imported():
    pass

@pytest.mark.timeout(2)
@pytest.mark.distributed(2)
def test_stuck(distributed_runtime):
    if distributed_runtime.rank == 1:
        time.sleep(1000)
    dist.barrier()

@pytest.mark.distributed(2)
def test_next(distributed_runtime):
    dist.barrier()
"""
    )
    assert run.outcomes == {"failed": 1, "passed": 2}, run.text
    report = run.about("test_stuck")
    assert report.strip().startswith("Rank 1 of 2 did not end, in call: Timeout (>2.0s)")
    assert "time.sleep(1000)" in run.row("test_stuck", 0)


def test_coverage_counts_what_ranks_run(suite, pytester):
    """With README.rst's setting, lines that only ranks run are covered."""
    need("pytest_cov")
    pytester.makepyfile(
        mine="""
        def only_in_ranks(rank):
            if rank == 1:
                return "one"
            return "zero"
        """
    )
    pytester.path.joinpath(".coveragerc").write_text("[run]\npatch = fork, _exit\n")
    run = suite(
        """
import mine

@pytest.mark.distributed(2)
def test_it(distributed_runtime):
    assert mine.only_in_ranks(distributed_runtime.rank)
""",
        "--cov=mine",
        "--cov-report=term-missing",
    )
    assert run.outcomes == {"passed": 1}
    assert re.search(r"mine\.py +4 +0 +100%", run.text), run.text


def test_randomly_reorders(suite):
    """Any order runs, and the line to reproduce a failure has the seed."""
    need("pytest_randomly")
    run = suite(MIXED, "-p", "randomly", "--randomly-seed=1", off=("cacheprovider",))
    assert run.outcomes == {"passed": 6, "failed": 2}
    assert "'test_it.py::test_many[world_size=2-2]' --randomly-seed=1" in run.text


def test_last_failed_and_first_failure(suite):
    """--lf runs what failed, -x stops after it."""
    assert suite(MIXED, off=("randomly",)).outcomes == {"passed": 6, "failed": 2}
    run = suite(MIXED, "--lf", off=("randomly",))
    assert run.outcomes == {"failed": 2}
    assert suite(MIXED, "-x").outcomes == {"passed": 2, "failed": 1}


def test_junit_xml(suite, pytester):
    """One case for each test, with the table in its failure."""
    run = suite(MIXED, "--junitxml=out.xml")
    assert run.outcomes == {"passed": 6, "failed": 2}
    cases = ET.parse(pytester.path / "out.xml").getroot().findall(".//testcase")
    assert len(cases) == 8
    failed = [case for case in cases if case.find("failure") is not None]
    assert [case.get("name") for case in failed] == ["test_many[world_size=2-2]", "test_one[2]"]
    text = failed[0].find("failure").text
    assert "ranks 0, 1  failed in call" in text


@pytest.mark.parametrize("how", ["--pdb", "breakpoint"])
def test_a_debugger_stops_the_clocks(suite, pytester, monkeypatch, how):
    """One rank has the terminal, for as long as somebody looks."""
    need("pexpect")
    import pexpect

    monkeypatch.setenv("TERM", "dumb")
    stop = "breakpoint()" if how == "breakpoint" else "assert not 'here'"
    pytester.makepyfile(
        test_it=IMPORTS
        + f"""
@pytest.mark.distributed(2, timeout=1)
def test_it():
    if os.environ["RANK"] == "1":
        secret = 6 * 7
        {stop}
"""
    )
    arguments = ["-m", "pytest", "-p", "no:randomly", *(["--pdb"] if how == "--pdb" else [])]
    process = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=60)
    process.expect(r"\(Pdb\)")
    time.sleep(3)  # far beyond the test's time, and the grace
    process.sendline("secret")
    process.expect("42")
    process.expect(r"\(Pdb\)")
    process.sendline("c")
    process.expect("1 passed" if how == "breakpoint" else "1 failed")
    process.expect(pexpect.EOF)


@pytest.mark.parametrize("capture", ["fd", "no"])
def test_a_breakpoint_stops_the_clocks(pytester, capture):
    """``rt.breakpoint`` in a test says on the terminal how to attach, and the test has no bound
    while somebody thinks."""
    pytester.makepyfile(
        test_it=IMPORTS
        + """
@pytest.mark.distributed(2, timeout=1)
def test_it(distributed_runtime):
    secret = 6 * 7
    distributed_runtime.breakpoint(rank=1)
    dist.barrier()
"""
    )
    with tempfile.TemporaryDirectory(prefix="dx-") as folder:
        environ = clean_environment({"DISTCTX_DIR": f"{folder}/n"})
        command = [sys.executable, "-m"]
        process = subprocess.Popen(
            [*command, "pytest", "-p", "no:randomly", f"--capture={capture}"],
            env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + 60
        while not any(rank.socket.exists() for rank in ranks_here(Path(folder) / "n")):
            assert time.monotonic() < end
            time.sleep(0.1)
        time.sleep(3)  # far beyond the test's time, and the grace
        said = subprocess.run(
            [*command, "distctx", "attach", "1"], env=environ, text=True, timeout=60,
            input="p secret\nc\n", capture_output=True, check=True,
        )  # fmt: skip
        out, _ = process.communicate(timeout=60)
    assert "42" in said.stdout
    assert re.search(r"\[distctx\] rank 1 of 2 is stopped at .*test_it.py:\d+", out)
    assert "1 passed" in out


LAUNCHED = """
import warnings

@pytest.mark.distributed(4)
def test_assert(distributed_runtime):
    print("output of", distributed_runtime.rank)
    assert distributed_runtime.rank != 2
    dist.barrier()

@pytest.mark.distributed(4, timeout=3)
def test_asleep(distributed_runtime):
    if distributed_runtime.rank == 3:
        time.sleep(1000)
    dist.barrier()

@pytest.mark.distributed(4)
def test_left():
    if os.environ["RANK"] == "1":
        os.environ["LEFT"] = "1"
        pytest.skip("only here")

@pytest.mark.distributed(world_size=[2, 4], mesh_shape=(-1, 2), mesh_dim_names=("dp", "tp"))
def test_good(distributed_runtime, tmp_path, shared_tmp_path):
    total = torch.ones(1)
    dist.all_reduce(total, group=distributed_runtime.group("tp"))
    assert total.item() == 2
    (shared_tmp_path / str(distributed_runtime.rank)).write_text(str(tmp_path))
    dist.barrier()
    assert len({path.read_text() for path in shared_tmp_path.iterdir()}) == 4
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL

def test_alone(distributed_runtime):
    assert distributed_runtime.world_size == 1
    assert os.environ["RANK"] == "0"
    warnings.warn("said by rank 0")

@pytest.mark.distributed(4)
def test_last(distributed_runtime):
    dist.barrier()
"""


def test_under_a_launcher_the_ranks_that_exist_run_it(suite):
    """Rank 0 reports for all; one that fails or sleeps neither hangs nor poisons the rest."""
    start = time.monotonic()
    run = suite(LAUNCHED, "-rs", python=tuple(torchrun("-m", "pytest", nproc=4)))
    took = time.monotonic() - start
    assert run.text.count("test session starts") == 1
    assert "3 failed, 3 passed, 1 skipped, 1 warning" in run.text, run.text
    assert "needs 2 ranks, this launch has 4" in run.text
    report = run.about("test_assert")
    assert report.strip().startswith("Rank 2 of 4 failed first, in call")
    assert "Captured stdout call, rank 3" in report
    assert run.row("test_assert", 0).startswith("rank 2 ")
    assert "a consequence" in run.row("test_assert", 1)
    report = run.about("test_asleep")
    assert report.strip().startswith("Rank 3 of 4 did not end, in call: the test's 3 s were over")
    assert "time.sleep(1000)" in run.row("test_asleep", 0)
    assert "left something behind" in run.row("test_left", 0)
    assert took < 30 + 2 * SLACK


def test_under_a_launcher_all_may_pass(suite):
    """And then the launch ends well, whatever order each rank would have had."""
    run = suite(
        LAUNCHED,
        *("-k", "good or last", "--deselect", "test_it.py::test_good[world_size=2]"),
        python=tuple(torchrun("-m", "pytest", nproc=4)),
        off=("cacheprovider",),
    )
    assert "2 passed" in run.text, run.text
    assert run.result.ret == 0


def test_under_a_launcher_a_suite_without_marked_tests_is_left_alone(suite):
    """Each rank is a pytest of its own, which runs and says all."""
    run = suite(
        """
def test_it():
    print("rank", os.environ["RANK"])
""",
        "-s",
        python=tuple(torchrun("-m", "pytest", nproc=2)),
    )
    assert run.text.count("test session starts") == 2
    assert run.text.count("1 passed") == 2
    assert all(f"rank {rank}" in run.text for rank in (0, 1))
