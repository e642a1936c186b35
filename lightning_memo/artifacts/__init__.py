"""Data that travels between the stages: costs, traces, plans and timelines. Imports neither torch nor Lightning."""
