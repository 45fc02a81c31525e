"""Errors that callers may want to catch. Both survive pickling, so they cross Ray actors unchanged."""


class UpstreamDriftError(RuntimeError):
    """The installed verl or vLLM is not the one this code was written for."""


class CheckpointFormatError(ValueError):
    """A checkpoint is incomplete, damaged or of a layout that is not supported."""
