"""Helpers without a subject of their own: files, units, compiled libraries, finding layers."""
