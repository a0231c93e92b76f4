"""Python imports this module where this folder is on PYTHONPATH: in the tests' own scripts and their children."""

import torchvision_operators  # noqa: F401
