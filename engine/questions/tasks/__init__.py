"""Task generators: questions made by code, so that every answer is known by construction."""
