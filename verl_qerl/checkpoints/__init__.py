"""Models on disk: how they are read, quantized on the way, written, and told apart by digests."""
