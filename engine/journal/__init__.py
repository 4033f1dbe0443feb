"""What a run leaves: metrics, trackers, tables, the report."""
