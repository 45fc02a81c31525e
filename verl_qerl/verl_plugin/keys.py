"""Names that actor and rollout agree on; apart, so that the actor does not import vLLM."""

# Key under which the actor's digests travel with the adapter's configuration.
DIGESTS = "verl_qerl_base_digests"
