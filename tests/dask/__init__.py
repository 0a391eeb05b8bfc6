"""Of kfcomm.dask: skipped where Dask is not installed."""
