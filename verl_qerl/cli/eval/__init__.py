"""`eval`: questions answered by vLLM, answers compared by math-verify, accuracies with intervals."""
