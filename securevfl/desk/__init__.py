"""Tools before and after a run: setup, report and scikit-learn estimators."""
