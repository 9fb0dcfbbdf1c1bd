"""What `import apex` finds under `preamp run`: preamp.compat.apex, or an Apex with it grafted on, takes its place."""

from preamp.compat.install import install_as_apex

install_as_apex()
