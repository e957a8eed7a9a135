"""Command line, replays, data sets and measurements; a robot needs none of it."""
