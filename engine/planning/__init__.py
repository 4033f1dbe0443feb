"""What a run will need and how fast it will go, before it starts: memory, a queueing simulation of both sides, node splits."""
