"""Arms and seeds of one configuration, trained one after another, on one page."""
