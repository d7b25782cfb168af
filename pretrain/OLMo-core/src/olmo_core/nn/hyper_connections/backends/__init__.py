"""Implementations of the mHC boundary."""
