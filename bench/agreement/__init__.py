"""Ways to agree where the whole batch is too large: accuracy of 16 ranks against that of one with a small batch."""
