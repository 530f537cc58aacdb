"""Operations across ranks: agreement, gathering, process groups, all-to-alls.

New collective operations belong here. This package does not depend on tasks or plans.
"""
