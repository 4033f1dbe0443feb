"""How a group is drawn: engines, waves, the top-token mask."""
