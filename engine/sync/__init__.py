"""Weights to the engines: gathered, bucketed, sent, checked."""
