"""``python -m aegis``."""

from aegis.cli import main

if __name__ == "__main__":
    main()
