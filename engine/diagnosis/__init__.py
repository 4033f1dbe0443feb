"""How fixed responses fare without their pictures, over checkpoints (paper 003)."""
