"""Which rollouts train."""
