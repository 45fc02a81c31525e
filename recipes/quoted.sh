# Sourced: a value for Hydra, whose bare values have no umlauts, brackets or `=`.
quoted() { printf "'%s'" "${1//\'/\\\'}"; }
