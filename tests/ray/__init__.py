"""Of kfcomm.ray: skipped where Ray is not installed."""
