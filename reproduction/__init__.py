"""The paper's figures, further mechanisms, and a verdict on each claim about them.

Run ``python -m reproduction --help`` in a checkout. Not a part of the installed package.
"""
