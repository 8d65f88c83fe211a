"""What the pytest plugin is made of; see ``distctx/pytest_plugin.py``."""

#: The parameter through which a world size reaches a test's id.
WORLD = "_distctx_world"

#: The name of the plugin by which a process is a rank of a test.
RANK = "distctx-rank"

#: The variable that names the file of the task, the rank, and the process that asked, to a fresh
#: pytest that is to be this rank.
TASK = "_DISTCTX_TEST_RANK"
