"""Operations of several ranks: agreement, gathering, process groups, all-to-alls.

A new way for ranks to agree belongs here. Nothing here knows tasks or plans.
"""
