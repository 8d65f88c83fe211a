"""What the pytest plugin is made of; see ``distctx/pytest_plugin.py``."""

#: The parameter through which a world size reaches a test's id.
WORLD = "_distctx_world"

#: The variable that names the file of the task, the rank, and the process that asked, to a fresh
#: pytest that is to be this rank.
TASK = "_DISTCTX_TEST_RANK"
