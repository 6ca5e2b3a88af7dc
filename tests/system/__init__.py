"""Runs on real processes, for tests and benchmarks: processes, audits, histories, a tiny task."""
