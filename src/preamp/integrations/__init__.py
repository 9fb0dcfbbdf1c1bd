"""preamp in other frameworks: a module for each, imported only when asked for."""
