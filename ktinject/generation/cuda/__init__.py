"""The kernels of a decode step on a GPU, and the modules whose forward they replace in a captured step."""
