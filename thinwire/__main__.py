"""`python -m thinwire`."""

from thinwire.cli import main

main()
