"""The verbs: from the caller's arrays to posted collectives, and from their ends to results."""
