"""Command-line tools that come with the plugin."""
