"""A small world whose videos are made from scripts, so that the truth of every hop is known."""
