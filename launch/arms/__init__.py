"""The arms of a run: the program under one strategy each, lowered and stepped side by side."""
