"""What the pytest plugin is made of; see ``distctx/pytest_plugin.py``."""

#: The parameter through which a world size reaches a test's id.
WORLD = "_distctx_world"
