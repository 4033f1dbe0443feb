"""The rollout side of a run: which groups make a batch, in which process they are drawn, on which servers, with which weights."""
