"""Benchmarks of the store, as a user can run them: `kvpool bench store`. Timed figures, never tests."""
