"""The version of Hydrax, kept here alone; the build reads it from this file."""

__version__ = "1.0.0"
