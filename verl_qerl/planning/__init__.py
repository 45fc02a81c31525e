"""How much memory a run needs, from the sizes of its model."""
