"""What transformers raises where a file of a model has values of another kind than it expects."""

from huggingface_hub.errors import StrictDataclassError

ODD_VALUES = (AttributeError, LookupError, StrictDataclassError, TypeError, ValueError)
