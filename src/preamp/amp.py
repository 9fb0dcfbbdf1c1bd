"""Apex's `amp`, looked for in the wrong place: `from preamp import amp`, where an AttributeError's words are lost."""

raise ImportError("preamp has no amp: write from preamp.compat.apex import amp, or preamp.prepare(...)")
