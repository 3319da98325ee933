"""Views of a run while it goes on, on the terminal or in a browser."""
