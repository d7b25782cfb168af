"""Implementations of the Attention Residuals boundary."""
