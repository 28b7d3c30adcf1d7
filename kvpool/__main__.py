"""`python -m kvpool`: the same as the `kvpool` command."""

from kvpool.cli.app import main

if __name__ == "__main__":
    main()
