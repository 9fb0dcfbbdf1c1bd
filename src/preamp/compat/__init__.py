"""Doors for code that was written for somebody else's mixed precision."""
