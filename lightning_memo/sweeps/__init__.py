"""Sweeps: jobs that may be interrupted and go on, in processes of their own, and one table and picture at the end."""
