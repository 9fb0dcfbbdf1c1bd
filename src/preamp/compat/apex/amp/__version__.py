"""The version of `apex.amp` that scripts print: that of Apex."""

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))
