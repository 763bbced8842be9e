"""`python -m batch_gen`."""

from batch_gen.cli import main

main()
