"""How the doctor is begun: around a script in a process of its own, or from code. The parent needs no torch."""
