"""Time to a trained model: the epochs that a global batch needs, the seconds of a step, and the best mix of both."""
