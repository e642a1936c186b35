"""Copies between device and host on streams of their own, their events, and the times of both."""
