"""Sweeps of runs: jobs that may be interrupted and resumed, with one table and picture at the end."""
