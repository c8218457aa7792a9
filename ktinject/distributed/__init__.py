"""Several GPUs in one process, and several processes."""
