"""LaunchEnvironment.detect against the variables that each launcher sets, alone and nested."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import pytest

from distctx.environment import LaunchEnvironment
from distctx.exceptions import LaunchEnvironmentError
from distctx.launchers import first_host

detect = LaunchEnvironment.detect

ADDRESS = {"MASTER_ADDR": "meet.example", "MASTER_PORT": "29501"}

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    **ADDRESS,
}

OPENMPI_4 = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "1724645377",
}

OPENMPI_5 = {
    **{name: value for name, value in OPENMPI_4.items() if name.startswith("OMPI_COMM")},
    "PMIX_NAMESPACE": "prterun-node7-3141@1",
}

HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_PROCID": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08],big1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
}

BATCH_SCRIPT = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}

#: The step of the daemons that mpirun starts on the other hosts of an allocation; its variables are
#: passed on to the ranks.
DAEMONS = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"} | {
    "SLURM_STEP_NODELIST": "gpu08",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}

LAUNCHES = {
    "torchrun": TORCHRUN,
    "openmpi 4": OPENMPI_4,
    "openmpi 5": OPENMPI_5,
    "hydra": HYDRA,
    "slurm": SRUN,
}

each_launch = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def place(env: LaunchEnvironment) -> tuple[object, ...]:
    return (
        env.launcher,
        env.rank,
        env.world_size,
        env.local_rank,
        env.local_world_size,
        env.node_rank,
    )


def address(env: LaunchEnvironment) -> tuple[str | None, int | None]:
    return env.master_addr, env.master_port


def refusal(environ: Mapping[str, str], **arguments: object) -> str:
    with pytest.raises(LaunchEnvironmentError) as caught:
        detect(environ, **arguments)
    return str(caught.value)


def assert_says(message: str, parts: Iterable[str]) -> None:
    missing = [part for part in parts if part not in message]
    assert not missing, message


class TestEachLauncher:
    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            (TORCHRUN, ("torchrun", 5, 8, 1, 4, 1)),
            (OPENMPI_4, ("openmpi", 2, 4, 2, 4, 0)),
            (OPENMPI_5, ("openmpi", 2, 4, 2, 4, 0)),
            (HYDRA, ("pmi", 2, 4, 2, 4, 0)),
            (SRUN, ("slurm", 8, 9, 0, 1, 2)),
            ({**SRUN, "SLURM_PROCID": "6", "SLURM_NODEID": "1"}, ("slurm", 6, 9, 0, 4, 1)),
            ({}, ("none", 0, 1, 0, 1, 0)),
        ],
        ids=["torchrun", "openmpi 4", "openmpi 5", "hydra", "srun", "srun, other host", "none"],
    )
    def test_place_of_the_process(self, environ, expected):
        """Rank, world size, local rank, local world size and host come from the launcher."""
        assert place(detect(environ)) == expected

    def test_rank_and_world_size_are_enough(self):
        """RANK and WORLD_SIZE without LOCAL_RANK are a launch, whose local rank is not known."""
        env = detect({"RANK": "1", "WORLD_SIZE": "2", **ADDRESS})
        assert place(env) == ("torchrun", 1, 2, None, None, None)

    @pytest.mark.parametrize(
        ("told", "served"), [("True", True), ("False", False), (None, False)], ids=str
    )
    def test_agent_serves_the_store(self, told, served):
        """Only torchrun's own word says that its agent serves the store."""
        environ = without(TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE")
        if told is not None:
            environ["TORCHELASTIC_USE_AGENT_STORE"] = told
        assert detect(environ).store_is_served is served

    @pytest.mark.parametrize(
        ("per_node", "node", "expected"),
        [("9", 0, 9), ("3(x3)", 2, 3), ("4(x2),1", 0, 4), ("1,4(x2)", 0, 1), ("2,3,4", 1, 3)],
    )
    def test_tasks_per_node_in_slurm_words(self, per_node, node, expected):
        """The number of ranks on this host is read from SLURM's run-length list."""
        environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": str(node)}
        assert detect(environ).local_world_size == expected

    @each_launch
    def test_launch_has_no_reason_against_it(self, launch):
        """A launch that is one gives no reason why it is none."""
        assert detect(launch).reason == ""

    @each_launch
    def test_sources_name_the_variables(self, launch):
        """Each value that was found names what it came from; rank and world size name variables."""
        env = detect(launch)
        assert {env.sources["rank"], env.sources["world_size"]} <= set(launch)
        assert launch[env.sources["rank"]] == str(env.rank)
        assert launch[env.sources["world_size"]] == str(env.world_size)
        for name in ("local_rank", "local_world_size", "node_rank", "master_addr", "master_port"):
            assert env.sources[name]

    def test_environment_of_the_process_by_default(self, monkeypatch):
        """Without a mapping the variables are those of this process."""
        for name in itertools.chain(*LAUNCHES.values()):
            monkeypatch.delenv(name, raising=False)
        assert detect().launcher == "none"
        for name, value in TORCHRUN.items():
            monkeypatch.setenv(name, value)
        assert detect() == detect(TORCHRUN)

    def test_mapping_is_only_read(self):
        """Any mapping will do, and nothing is written to it."""
        assert detect(MappingProxyType(SRUN)) == detect(SRUN)


class TestNesting:
    def test_torchrun_inside_srun(self):
        """Under torchrun that srun started once a host, torchrun says who this is."""
        agents = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1"}
        agents["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
        assert detect({**agents, **TORCHRUN}) == detect(TORCHRUN)

    @pytest.mark.parametrize("script", [BATCH_SCRIPT, {**SRUN, "SLURM_STEP_ID": "4294967290"}])
    def test_torchrun_in_an_allocation(self, script):
        """torchrun started by hand in a batch script or an allocation's shell is the launch."""
        assert detect({**script, **TORCHRUN}) == detect(TORCHRUN)

    @pytest.mark.parametrize("mpi", [OPENMPI_4, OPENMPI_5, HYDRA], ids=["4", "5", "hydra"])
    def test_mpirun_in_an_allocation(self, mpi):
        """The step of mpirun's daemons, whose SLURM_PROCID they leave, does not count."""
        assert detect({**DAEMONS, **mpi}) == detect(mpi)

    def test_torchrun_inside_mpirun(self):
        """Under torchrun that mpirun started once a host, torchrun says who this is."""
        agents = {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        }
        assert detect({**agents, **TORCHRUN}) == detect(TORCHRUN)

    def test_open_mpi_before_pmi_before_slurm(self):
        """Of several complete launches that count differently the innermost decides."""
        pmi = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
        assert detect({**SRUN, **pmi, **OPENMPI_4, **TORCHRUN}).launcher == "torchrun"
        assert detect({**SRUN, **pmi, **OPENMPI_4}).launcher == "openmpi"
        assert detect({**SRUN, **pmi}).launcher == "pmi"
        assert detect(SRUN).launcher == "slurm"

    def test_broken_launch_further_out_does_not_matter(self):
        """What is wrong with a launch that does not decide is not this process's fault."""
        assert detect({**SRUN, "SLURM_LOCALID": "x", **TORCHRUN}) == detect(TORCHRUN)

    def test_srun_with_pmi2(self):
        """srun's own PMI gives rank and world size; local rank, host and address are SLURM's."""
        env = detect({**SRUN, "PMI_RANK": "8", "PMI_SIZE": "9", "PMI_JOBID": "4711.3"})
        assert place(env) == ("pmi", *place(detect(SRUN))[1:])
        assert env.master_addr == "gpu07"
        assert env.sources["local_rank"] == "SLURM_LOCALID"
        assert env.sources["master_addr"] == "first host of SLURM_STEP_NODELIST"

    def test_world_size_exported_before_srun(self):
        """A WORLD_SIZE that a batch script exports is completed by the step that agrees with it."""
        env = detect({**SRUN, "WORLD_SIZE": "9"})
        assert place(env) == place(detect(SRUN))
        assert address(env) == address(detect(SRUN))
        assert env.sources["world_size"] == "WORLD_SIZE"
        assert env.sources["rank"] == "SLURM_PROCID"

    def test_world_size_exported_wrongly_before_srun(self):
        """A WORLD_SIZE that contradicts the step is an error that gives both."""
        message = refusal({**SRUN, "WORLD_SIZE": "4"})
        assert_says(message, ["WORLD_SIZE=4", "SLURM_STEP_NUM_TASKS=9"])

    def test_rank_and_world_size_exported_from_slurm(self):
        """RANK and WORLD_SIZE copied from the step leave the local rank and the address to it."""
        env = detect({**SRUN, "RANK": "8", "WORLD_SIZE": "9"})
        assert place(env) == ("torchrun", *place(detect(SRUN))[1:])
        assert address(env) == address(detect(SRUN))


class TestArguments:
    @each_launch
    def test_arguments_beat_the_launcher(self, launch):
        """Rank and world size given as arguments stand, whatever the launcher says."""
        env = detect({**launch, **ADDRESS}, rank=0, world_size=2)
        assert (env.rank, env.world_size) == (0, 2)
        assert env.sources["rank"] == "argument rank"
        assert env.sources["world_size"] == "argument world_size"

    def test_argument_completes_the_launcher(self):
        """One argument and one variable are a launch together."""
        env = detect({"WORLD_SIZE": "4", **ADDRESS}, rank=3)
        assert (env.rank, env.world_size) == (3, 4)
        env = detect({"RANK": "3", **ADDRESS}, world_size=4)
        assert (env.rank, env.world_size) == (3, 4)

    def test_arguments_beat_a_broken_launcher(self):
        """With both arguments, variables that are no numbers do not matter."""
        env = detect({"RANK": "x", "WORLD_SIZE": "", **ADDRESS}, rank=1, world_size=2)
        assert (env.rank, env.world_size) == (1, 2)

    def test_equal_arguments_keep_the_rest(self):
        """Arguments that say what the launcher says leave the local rank to the launcher."""
        assert place(detect(TORCHRUN, rank=5, world_size=8))[1:] == place(detect(TORCHRUN))[1:]

    def test_world_of_one_out_of_many(self):
        """A process of a launch may be a world of its own; it keeps its place on the host."""
        env = detect(TORCHRUN, rank=0, world_size=1)
        assert (env.rank, env.world_size, env.local_rank) == (0, 1, 1)
        assert address(env) == (None, None)

    def test_larger_world_than_was_started(self):
        """In a world larger than the launch, whose processes others started, no place is known."""
        env = detect(TORCHRUN, rank=9, world_size=16)
        assert (env.local_rank, env.local_world_size, env.node_rank) == (None, None, None)

    def test_url_counts_as_arguments(self):
        """Rank and world size in the query of init_method beat the launcher, as arguments do."""
        env = detect(TORCHRUN, init_method="tcp://host:1?rank=1&world_size=3")
        assert (env.rank, env.world_size) == (1, 3)
        assert env.sources["rank"] == "rank in init_method"
        assert address(env) == (None, None)

    def test_url_is_completed_by_arguments_and_variables(self):
        """A URL that gives one of the two is completed by an argument or by the launcher."""
        env = detect({}, init_method="file:///store?rank=1", world_size=3)
        assert (env.rank, env.world_size) == (1, 3)
        env = detect({"RANK": "1"}, init_method="file:///store?world_size=3")
        assert (env.rank, env.world_size) == (1, 3)

    def test_own_meeting_place_needs_no_address(self):
        """With a URL of the caller's no address is asked for, nor given."""
        launch = {"RANK": "1", "WORLD_SIZE": "2"}
        assert address(detect(launch, init_method="file:///store")) == (None, None)
        assert detect({**launch, **ADDRESS}, init_method="env://").master_addr == "meet.example"

    def test_address_may_be_absent_where_it_is_not_needed(self):
        """Ranks that do not meet by address have none where it is unknown, and keep a known one."""
        launch = {"RANK": "1", "WORLD_SIZE": "2"}
        assert address(detect(launch, needs_address=False)) == (None, None)
        env = detect({**launch, **ADDRESS}, needs_address=False)
        assert address(env) == ("meet.example", 29501)

    @pytest.mark.parametrize("rank", [np.int64(1), np.uint8(1)], ids=repr)
    def test_numpy_ints_are_ints(self, rank):
        """A rank may be a numpy integer, and is a plain one afterwards."""
        assert type(detect(ADDRESS, rank=rank, world_size=np.int64(2)).rank) is int

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"rank": True, "world_size": 2}, ["rank must be an int", "True"]),
            ({"rank": "0", "world_size": 2}, ["rank must be an int", "'0'"]),
            ({"rank": 0, "world_size": 2.0}, ["world_size must be an int", "2.0"]),
            ({"rank": -1, "world_size": 2}, ["rank=-1", "at least 0"]),
            ({"rank": 0, "world_size": 0}, ["world_size=0", "at least 1"]),
            ({"rank": 2, "world_size": 2}, ["argument rank=2", "less than argument world_size=2"]),
            ({"init_method": "localhost:1"}, ["must be a URL", "tcp://", "'localhost:1'"]),
            ({"init_method": 5}, ["must be a URL", "got 5"]),
            ({"init_method": "tcp://h:1?rank=x&world_size=2"}, ["rank='x'", "whole number"]),
            ({"init_method": "tcp://h:1?rank=-1&world_size=2"}, ["rank='-1'", "whole number"]),
            (
                {"init_method": "tcp://h:1?rank=1&world_size=2", "rank": 0},
                ["argument rank=0", "tcp://h:1?rank=1", "contradict"],
            ),
        ],
        ids=repr,
    )
    def test_arguments_that_cannot_be(self, arguments, says):
        """An argument that is no rank, world size or URL is refused with what was got."""
        assert_says(refusal({}, **arguments), says)


class TestHalfLaunch:
    @pytest.mark.parametrize(
        ("environ", "arguments", "says"),
        [
            ({"RANK": "0"}, {}, ["RANK=0", "world_size"]),
            ({"WORLD_SIZE": "4"}, {}, ["WORLD_SIZE=4", "rank"]),
            ({"LOCAL_RANK": "0"}, {}, ["LOCAL_RANK=0", "rank", "world_size"]),
            ({"OMPI_COMM_WORLD_SIZE": "4"}, {}, ["OMPI_COMM_WORLD_SIZE=4", "rank"]),
            ({"OMPI_COMM_WORLD_RANK": "0"}, {}, ["OMPI_COMM_WORLD_RANK=0", "world_size"]),
            ({"PMI_SIZE": "4"}, {}, ["PMI_SIZE=4", "rank"]),
            ({"PMI_RANK": "0"}, {}, ["PMI_RANK=0", "world_size"]),
            (without(SRUN, "SLURM_PROCID"), {}, ["SLURM_STEP_NUM_TASKS=9", "rank"]),
            ({}, {"rank": 0}, ["argument rank=0", "world_size"]),
            ({}, {"world_size": 4}, ["argument world_size=4", "rank"]),
            ({"WORLD_SIZE": "4"}, {"world_size": 4}, ["world_size=4", "rank"]),
            ({}, {"init_method": "tcp://h:1?rank=0"}, ["rank in init_method=0", "world_size"]),
            ({**BATCH_SCRIPT, "WORLD_SIZE": "8"}, {}, ["WORLD_SIZE=8", "rank"]),
            ({**ADDRESS, "RANK": "0"}, {}, ["RANK=0", "world_size"]),
        ],
        ids=repr,
    )
    def test_half_a_launch_is_an_error(self, environ, arguments, says):
        """A launch that is partly set is never a world of 1; what is set and what is not are
        named."""
        assert_says(refusal(environ, **arguments), [*says, "half a launch"])

    @pytest.mark.parametrize("absent", ["MASTER_ADDR", "MASTER_PORT"])
    def test_address_must_be_known(self, absent):
        """Where nothing says where several ranks meet, what is absent is named."""
        message = refusal(without(TORCHRUN, absent))
        assert_says(message, [f"{absent} is not set", "WORLD_SIZE=8"])
        assert "MASTER_ADDR and MASTER_PORT" in refusal(without(TORCHRUN, *ADDRESS))


class TestFaults:
    @pytest.mark.parametrize("text", ["", " ", "x", "1.0", "1e3", "0x1", "1 2", "None", "١"])
    @pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"])
    def test_no_number(self, name, text):
        """A variable that holds no whole number, be it empty, is named with what it holds."""
        assert f"{name}={text!r} is not a whole number" in refusal({**TORCHRUN, name: text})

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("RANK", "-1"),
            ("LOCAL_RANK", "-1"),
            ("WORLD_SIZE", "0"),
            ("LOCAL_WORLD_SIZE", "0"),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "65536"),
            ("MASTER_PORT", "http"),
        ],
    )
    def test_number_that_cannot_be(self, name, text):
        """A number that is too small or too large is named with what it holds."""
        assert f"{name}={text!r}" in refusal({**TORCHRUN, name: text})

    @pytest.mark.parametrize(
        ("launch", "wrong", "says"),
        [
            (TORCHRUN, {"RANK": "8"}, ["RANK=8", "less than WORLD_SIZE=8"]),
            (TORCHRUN, {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "less than LOCAL_WORLD_SIZE=4"]),
            (TORCHRUN, {"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"]),
            (TORCHRUN, {"GROUP_RANK": "8"}, ["GROUP_RANK=8", "WORLD_SIZE=8"]),
            (
                OPENMPI_4,
                {"OMPI_COMM_WORLD_RANK": "4"},
                ["OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4"],
            ),
            (HYDRA, {"PMI_RANK": "7"}, ["PMI_RANK=7", "PMI_SIZE=4"]),
            (HYDRA, {"MPI_LOCALRANKID": "4"}, ["MPI_LOCALRANKID=4", "MPI_LOCALNRANKS=4"]),
            (SRUN, {"SLURM_PROCID": "9"}, ["SLURM_PROCID=9", "SLURM_STEP_NUM_TASKS=9"]),
            (SRUN, {"SLURM_LOCALID": "1"}, ["SLURM_LOCALID=1", "SLURM_STEP_TASKS_PER_NODE=1"]),
            (
                SRUN,
                {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
                ["SLURM_STEP_TASKS_PER_NODE='4(x2)'", "8", "SLURM_STEP_NUM_TASKS=9"],
            ),
            (SRUN, {"SLURM_STEP_NODELIST": "gpu[7"}, ["SLURM_STEP_NODELIST='gpu[7'"]),
        ],
        ids=repr,
    )
    def test_launch_that_contradicts_itself(self, launch, wrong, says):
        """Variables of one launcher that exclude each other are named with their values."""
        assert_says(refusal({**launch, **wrong}), says)

    @pytest.mark.parametrize(
        ("launch", "wrong"),
        [
            (TORCHRUN, {"RANK": "", "WORLD_SIZE": "many", "LOCAL_RANK": "-1"}),
            (TORCHRUN, {"RANK": "x", "LOCAL_RANK": "7", "GROUP_RANK": "9"}),
            (OPENMPI_5, {"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_LOCAL_SIZE": "0"}),
            (HYDRA, {"PMI_RANK": "x", "PMI_SIZE": "0", "MPI_LOCALRANKID": "9"}),
            (
                SRUN,
                {"SLURM_PROCID": "12", "SLURM_LOCALID": "", "SLURM_STEP_NODELIST": "[", "X": "x"},
            ),
        ],
        ids=repr,
    )
    def test_every_variable_at_fault_is_listed(self, launch, wrong):
        """One error lists all the variables that are wrong, not the first alone."""
        message = refusal({**launch, **wrong})
        assert_says(message, [f"{name}=" for name in wrong if name in launch])
        assert_says(message, [value for name, value in wrong.items() if name in launch])

    def test_blanks_around_a_number_are_no_fault(self):
        """A number with blanks around it, as some shells leave it, is that number."""
        assert detect({**TORCHRUN, "RANK": " 5\n"}).rank == 5


class TestNoLaunch:
    @pytest.mark.parametrize(
        ("environ", "says"),
        [
            ({}, ["no launcher"]),
            ({"MASTER_ADDR": "meet.example"}, ["MASTER_ADDR=meet.example", "RANK"]),
            ({"MASTER_PORT": "29501"}, ["MASTER_PORT=29501", "WORLD_SIZE"]),
            (ADDRESS, ["MASTER_ADDR=meet.example", "MASTER_PORT=29501"]),
            ({"SLURM_JOB_ID": "4711"}, ["4711", "srun"]),
            (BATCH_SCRIPT, ["4711", "SLURM_NTASKS=8", "srun"]),
            ({**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967291"}, ["4711", "SLURM_NTASKS=8"]),
            ({**SRUN, "SLURM_STEP_ID": "4294967290"}, ["4711", "srun"]),
            (without(SRUN, "SLURM_STEP_NUM_TASKS"), ["4711", "srun"]),
        ],
        ids=["nothing", "address", "port", "both", "ssh shell", "batch", "batch id", "salloc", "?"],
    )
    def test_no_launch_is_a_world_of_one_with_a_reason(self, environ, says):
        """What looks like a launch but is none is a world of 1, and says why."""
        env = detect(environ)
        assert place(env) == ("none", 0, 1, 0, 1, 0)
        assert address(env) == (None, None)
        assert_says(env.reason, says)

    @pytest.mark.parametrize(
        ("environ", "doubtful"),
        [
            ({}, False),
            (ADDRESS, True),
            (BATCH_SCRIPT, True),
            ({**BATCH_SCRIPT, "SLURM_NTASKS": "1"}, False),
            (TORCHRUN, False),
        ],
        ids=["nothing", "address", "batch", "batch of one task", "launch"],
    )
    def test_world_of_one_is_doubtful_where_more_was_meant(self, environ, doubtful):
        """Variables that speak of more processes make a world of 1 doubtful; a launch never is."""
        assert detect(environ).is_doubtful is doubtful

    @each_launch
    def test_world_of_one_needs_no_address(self, launch):
        """A launch of one process meets nobody, so it has no address."""
        alone = {"RANK", "LOCAL_RANK", "GROUP_RANK", "PROCID", "LOCALID", "NODEID", "LOCALRANKID"}
        environ = {
            name: "0" if any(name.endswith(ending) for ending in alone) else "1"
            for name in without(launch, *ADDRESS, "TORCHELASTIC_USE_AGENT_STORE")
        }
        env = detect(environ)
        assert env.launcher != "none"
        assert (env.rank, env.world_size) == (0, 1)
        assert address(env) == (None, None)


class TestAddress:
    @each_launch
    def test_told_address_wins(self, launch):
        """MASTER_ADDR and MASTER_PORT are used under every launcher, and named as the source."""
        env = detect({**launch, **ADDRESS})
        assert address(env) == ("meet.example", 29501)
        assert (env.sources["master_addr"], env.sources["master_port"]) == tuple(ADDRESS)

    @pytest.mark.parametrize("launch", [OPENMPI_4, OPENMPI_5, HYDRA, SRUN])
    def test_half_an_address_is_completed(self, launch):
        """Where only the host or only the port is told, the launcher yields the other."""
        host, port = address(detect(launch))
        assert address(detect({**launch, "MASTER_ADDR": "meet.example"})) == ("meet.example", port)
        assert address(detect({**launch, "MASTER_PORT": "29501"})) == (host, 29501)

    def test_slurm_meets_at_the_first_host_of_the_step(self):
        """The ranks of a step meet at its first host, which all of them read alike."""
        placed = [
            {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
            for rank, (node, local) in enumerate([(0, 0), (0, 1), (1, 0), (2, 0)])
        ]
        addresses = {address(detect({**SRUN, **own})) for own in placed}
        assert len(addresses) == 1
        host, port = addresses.pop()
        assert host == "gpu07"
        assert 1024 <= port <= 65535

    def test_slurm_port_differs_between_jobs_and_steps(self):
        """Steps that may run at once on one host meet at ports of their own."""
        jobs = itertools.product(("4711", "4712"), ("0", "1"))
        ports = {
            detect({**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).master_port
            for job, step in jobs
        }
        assert len(ports) == 4

    @pytest.mark.parametrize(
        ("launch", "job"),
        [
            (OPENMPI_4, "OMPI_MCA_ess_base_jobid"),
            (OPENMPI_5, "PMIX_NAMESPACE"),
            (HYDRA, "PMI_JOBID"),
        ],
    )
    def test_mpi_on_one_host(self, launch, job):
        """Ranks of MPI on one host meet there, at a port that follows from the job's id."""
        first, again, other = (
            detect({**launch, job: name}) for name in ("job.1", "job.1", "job.2")
        )
        assert first.master_addr == "127.0.0.1"
        assert first.sources["master_port"] == job
        assert address(first) == address(again)
        assert first.master_port != other.master_port
        assert 1024 <= first.master_port <= 65535

    def test_mpi_without_a_job_id(self):
        """An MPI that gives its job no id leaves torch's own default port."""
        assert address(detect(HYDRA)) == ("127.0.0.1", 29500)

    @pytest.mark.parametrize(
        ("launch", "local_size", "how"),
        [
            (OPENMPI_4, {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "-x MASTER_ADDR="),
            (OPENMPI_5, {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "-x MASTER_ADDR="),
            (HYDRA, {"MPI_LOCALNRANKS": "3"}, "-genv MASTER_ADDR "),
        ],
    )
    def test_mpi_across_hosts(self, launch, local_size, how):
        """Ranks of MPI on several hosts must be told where to meet; the error says how."""
        environ = {**launch, **local_size}
        assert_says(refusal(environ), ["MASTER_ADDR is not set", how])
        env = detect({**environ, "MASTER_ADDR": "meet.example"})
        assert env.master_addr == "meet.example"
        assert env.node_rank is None


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu", "gpu"),
        ("gpu7,gpu8", "gpu7"),
        ("gpu[7-8]", "gpu7"),
        ("a[01-03,7],b2", "a01"),
        ("a[7,01-03],b2", "a7"),
        ("a[007]", "a007"),
        ("b2,a[01-03]", "b2"),
        ("[1-3]", "1"),
        ("n[1-2]x[3-4]", "n1x3"),
        ("rack[2,4]-[08-10].example,c", "rack2-08.example"),
        ("a-b-1,c", "a-b-1"),
        ("a[1-3]-ib", "a1-ib"),
        ("login.example.org", "login.example.org"),
        ("  a1 ", "a1"),
        ("", None),
        (",a", None),
        ("a[", None),
        ("a[]", None),
        ("a[1-2", None),
        ("a]1", None),
        ("a1-2]", None),
        ("a[-3]", None),
        ("a[,1]", None),
        ("a[[1]]", None),
        ("a[1-2]]", None),
    ],
    ids=repr,
)
def test_first_host(nodelist, host):
    """The first host of a SLURM node list is found in every form, and none in what is no list."""
    assert first_host(nodelist) == host


class TestObject:
    @pytest.mark.parametrize("attribute", ["rank", "master_addr", "note"])
    def test_does_not_change(self, attribute):
        """No attribute can be set after the launch was read."""
        env = detect(TORCHRUN)
        with pytest.raises(AttributeError):
            setattr(env, attribute, 3)
        assert env == detect(TORCHRUN)

    def test_equal_by_what_is_told(self):
        """Environments that say the same are equal and hash alike, whatever they were read from."""
        env = detect({"RANK": "1", "WORLD_SIZE": "2", **ADDRESS})
        argued = detect({"RANK": "1", **ADDRESS}, world_size=2)
        assert env == argued
        assert hash(env) == hash(argued)
        assert env != detect({"RANK": "0", "WORLD_SIZE": "2", **ADDRESS})


class TestWhatOnceWentWrong:
    @pytest.mark.parametrize(
        ("environ", "lacks"),
        [
            ({"PMI_RANK": "0"}, "PMI_SIZE"),
            (without(SRUN, "SLURM_PROCID"), "SLURM_PROCID"),
            ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_RANK"),
        ],
    )
    def test_half_a_launch_names_its_launchers_variables(self, environ, lacks):
        """What lacks is called as its launcher calls it, and nothing derived is said to be set."""
        message = refusal(environ)
        assert f"but {lacks} (or the argument" in message
        assert "default" not in message
        assert "first host" not in message

    def test_pmi2_of_srun_meets_where_the_step_does(self):
        """srun --mpi=pmi2 meets at the port of its step, not at a default that two steps share."""
        assert address(detect({**SRUN, "PMI_RANK": "8", "PMI_SIZE": "9"})) == address(detect(SRUN))

    def test_number_beyond_reason(self):
        """A number of thousands of digits is a fault like any other, and shown short."""
        message = refusal({**TORCHRUN, "RANK": "9" * 5000})
        assert "is not a whole number" in message
        assert len(message) < 500

    def test_env_url_with_a_query_takes_the_address_from_the_launcher(self):
        """env:// with a query is still env://: the address is the launcher's."""
        env = detect(ADDRESS, init_method="env://?rank=0&world_size=2")
        assert (env.rank, env.world_size) == (0, 2)
        assert address(env) == (ADDRESS["MASTER_ADDR"], int(ADDRESS["MASTER_PORT"]))

    @pytest.mark.parametrize("query", ["rank=&world_size=2", "rank=0&rank=1&world_size=2"])
    def test_query_that_is_not_one_number(self, query):
        """A rank in the URL that is empty, or is there twice, is an error."""
        assert "is not one whole number" in refusal({}, init_method=f"tcp://h:1?{query}")

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ({"SLURM_NODEID": "5", "SLURM_STEP_TASKS_PER_NODE": "5,4"}, "is 2 hosts"),
            ({"SLURM_STEP_TASKS_PER_NODE": "junk"}, "is not a list"),
            ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),junk"}, "is not a list"),
        ],
    )
    def test_slurm_that_contradicts_itself(self, wrong, says):
        """A node beyond the step's, or tasks that are no list, are faults with their values."""
        message = refusal({**SRUN, **wrong})
        assert_says(message, [says, *(str(value) for value in wrong.values())])

    def test_each_argument_beats_its_variable(self):
        """One argument beats its own variable, though that is no number; the other is read."""
        assert detect({**TORCHRUN, "RANK": "abc"}, rank=3).rank == 3
        assert "RANK='abc'" in refusal({**TORCHRUN, "RANK": "abc"}, world_size=4)

    @pytest.mark.parametrize("nodelist", ["a b", "a[1-]", "a[x-y]", "a[1", "[", ",a", ""])
    def test_what_is_no_node_list(self, nodelist):
        """What SLURM would not write is no node list."""
        assert first_host(nodelist) is None
