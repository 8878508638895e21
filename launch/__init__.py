"""The launcher: command line, data, training, measuring, report."""
