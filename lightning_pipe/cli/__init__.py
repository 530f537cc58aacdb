"""The command ``lightning-pipe``: training under a configuration, plans, estimates, exports.

Each subcommand parses its arguments and calls one function of another room.
"""
