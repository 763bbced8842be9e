"""Nightly regression renders: a suite, its baselines, gates that bite, and the stage that moved."""
