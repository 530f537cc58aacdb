"""Errors, checks of options, quantities, checked YAML, tables for terminals, safe text and durable files.

Code that several sub-packages use and that does not depend on plans, threads or ranks belongs here. It imports no other
part of the package. All sub-packages except ``_compat`` may import these modules.
"""
