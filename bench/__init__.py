"""Benchmarks: ``python -m headrace.bench``."""
