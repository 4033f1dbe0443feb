"""What each token is worth."""
