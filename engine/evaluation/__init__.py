"""How good a policy is: rates on held-out questions, and the command that measures a checkpoint."""
