"""What `import amp_C` finds under `preamp run`; NVIDIA's, or preamp's own, takes its place."""

from preamp.compat.install import load_extension

load_extension(__name__)
