"""A language model written once for one device, laid out over many by a small YAML file."""

__version__ = "0.1.0"
