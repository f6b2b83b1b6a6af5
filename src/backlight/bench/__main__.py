"""`python -m backlight.bench`: the same as `backlight bench`."""

from backlight.bench.command import app

if __name__ == "__main__":
    app(prog_name="backlight bench")
