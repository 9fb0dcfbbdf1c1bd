"""A pytest plugin: `pytest -p tests.emulator.plugin -m gpu` runs GPU tests and kernels on the fake CUDA device."""

from __future__ import annotations

from ..pretend import plugin
from .driver import install

install(plugin.NATIVE)
