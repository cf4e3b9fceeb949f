"""Metrics: how far two keys are apart. :mod:`securevfl.linkage.stage.linking` lists them."""
