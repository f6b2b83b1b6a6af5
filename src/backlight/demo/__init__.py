"""What `backlight demo` shows: each part is one module with a `run(console, out) -> bool`."""
