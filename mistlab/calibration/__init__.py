"""Fitting calibrations to measurements, with residuals on rows that were held out."""
