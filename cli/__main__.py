"""`python -m kvrelay.cli`: the same as `kvrelay`."""

from kvrelay.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
