"""`python -m backlight` is the `backlight` command."""

from backlight.cli import main

if __name__ == "__main__":
    main()
