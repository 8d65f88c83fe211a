"""Benchmarks of distctx; see README.rst here."""
