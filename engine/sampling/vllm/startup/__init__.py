"""A folder for ``PYTHONPATH`` of a server's processes; see ``sitecustomize``."""
