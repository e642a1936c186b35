"""Drives profile -> plan -> execute for one model while it trains, whichever framework trains it."""
