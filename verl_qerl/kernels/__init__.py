"""Fast versions of formats/reference.py for the actor, and what decodes in the rollout."""
