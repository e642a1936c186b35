"""Callbacks that MemoStrategy adds: profile the first step, plan, watch memory, retry after running out of it."""
