"""What lies on disk: files, their headers, the formats of their tensors."""
