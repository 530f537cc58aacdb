"""The command ``lightning-pipe``: training from a configuration, plans, estimates and exports.

Each subcommand parses its arguments and calls one function of another sub-package.
"""
