"""`python -m lossyspec.tuner`, as the command `lossytune`."""

from .cli import main

main()
