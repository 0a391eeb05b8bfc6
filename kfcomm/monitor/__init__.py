"""What watches a running job: its statistics and its timeline."""
