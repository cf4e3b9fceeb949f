"""Estimators as scikit-learn knows them: a federation behind ``fit`` and ``predict``."""
