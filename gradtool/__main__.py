"""`python -m gradtool`."""

from gradtool.cli import main

main()
