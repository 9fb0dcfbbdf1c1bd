"""Which functions O1 runs in 16 bits, in float32, at the widest type of their arguments, or not at all.

Plain lists of names: a script may append to them or remove from them before it calls `initialize` or `init`.
"""
