"""Marks that choose which cases a command runs."""
