"""Where prompts come from: data set rows, task generators, the ledger."""
