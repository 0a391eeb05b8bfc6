"""Agreement algorithms with a too large batch: accuracy of 16 ranks against one rank with a small batch."""
