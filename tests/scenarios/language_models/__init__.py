"""Language models under the strategies: schedules, dimensions and families together."""
