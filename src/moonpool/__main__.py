"""``python -m moonpool`` is the ``moonpool`` command."""

from moonpool.cli import main

if __name__ == "__main__":
    main()
