"""Operators of batch-gen: `<op>.py` is the contract and torch reference, `<op>_nki.py` its NKI twin.

Import submodules; nothing is imported here (see CONTRIBUTING, "Add a kernel").
"""
