"""The mathematics of QeRL: pure functions, no model classes."""
