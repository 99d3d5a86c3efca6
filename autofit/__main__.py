"""`python -m autofit`."""

from autofit.cli.app import main

if __name__ == "__main__":
    main()
