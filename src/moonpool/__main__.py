"""``python -m moonpool`` is the ``moonpool`` command."""

from moonpool.core.cli import main

if __name__ == "__main__":
    main()
