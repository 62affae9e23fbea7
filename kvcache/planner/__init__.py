"""What to start for a load: groups, routing and admission, proven optimal and then judged by replay."""

from kvcache.planner.plan import Plan, PlanError, plan

__all__ = ["Plan", "PlanError", "plan"]
