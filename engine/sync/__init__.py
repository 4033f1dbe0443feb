"""Weights to the engines."""
