"""Asynchronous copies between device and host: copy streams, their events, and the recording of their times."""
