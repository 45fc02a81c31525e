"""`python -m verl_qerl <command>`."""

import sys

try:
    from verl_qerl.cli import main

    code = main()
except KeyboardInterrupt:  # before `main` listens
    sys.stderr.write("python -m verl_qerl: interrupted\n")
    code = 130
sys.exit(code)
