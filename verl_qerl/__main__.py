"""`python -m verl_qerl <command>`."""

import sys

from verl_qerl.cli import main

sys.exit(main())
