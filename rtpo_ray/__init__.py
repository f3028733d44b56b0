"""rtpo-ray: reverse-turn policy optimisation of tool-using language-model agents. This package is the science; it never imports ray."""

__version__ = "0.1.0"
