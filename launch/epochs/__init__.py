"""`python -m pase_mtf.epochs`: epochs to a target, measured, and the time to a trained model, projected."""
