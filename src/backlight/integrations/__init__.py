"""Other people's models on top of `backlight.attention`; each integration imports its library only when it is used."""
