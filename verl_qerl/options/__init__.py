"""What a user can set under `qerl`, and what does not go together, for the driver, `plan` and the documentation."""
