"""Models on several GPUs: decoder layers split over the GPUs of one process, or tensor parallelism over processes."""
